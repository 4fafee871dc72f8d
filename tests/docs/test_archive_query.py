"""The queries that docs/trajectories.md shows run on an archive, and give its tokens."""

from __future__ import annotations

import re
from pathlib import Path

import duckdb
import pytest

from proxy.store.archive.archiving import archive_old
from tests.docs.pages import ROOT
from tests.support import assistant, says, serving, user

PAGE = (ROOT / "docs" / "trajectories.md").read_text(encoding="utf-8")


async def test_the_queries_of_the_page_give_the_turns_of_an_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    async with serving(tmp_path, says("one", "two"), database_url=url) as server:
        answer = (await server.answer([user("a")]))["content"]
        await server.chat([user("a"), assistant(answer), user("b")])
        await server.ok("/s/rl/end_session", {"reward": 0.5})
        samples = (await server.ok("/trajectories/export", {"session_id": "s", "layout": "individual"}))["samples"]
        turns = await server.tree()
    archive_old(url, 0.0, str(tmp_path / "archive"), dry_run=False)
    monkeypatch.chdir(tmp_path)
    summary, whole = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
    rows = duckdb.sql(summary).fetchall()
    assert [(row[0], row[1], row[4], row[5]) for row in rows] == [("s", 0, None, "one"), ("s", 1, 0.5, "two")]
    assert [row[2] for row in rows] == [turn["output_tokens"] for turn in turns]
    prompts = [(turn, prompt, output) for _, turn, prompt, output in duckdb.sql(whole).fetchall()]
    assert [turn for turn, _, _ in prompts] == [0, 1]
    assert [[*prompt, *output] for _, prompt, output in prompts] == [sample["input_ids"] for sample in samples]


def test_the_page_lists_the_columns_of_an_archive() -> None:
    from proxy.store.archive.parquet import _schema

    table = PAGE.partition("## Archived sessions")[2].partition("```sql\nWITH")[0]
    listed = {
        name
        for line in table.splitlines()
        if line.startswith("| `")
        for name in re.findall(r"`(\w+)`", line.split("|")[1])
    }
    assert listed == set(_schema().names)
