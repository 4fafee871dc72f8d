"""docs/trajectories.md lists every field of an export with its dtype and shape."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.trajectory.columns import columns_of
from proxy.trajectory.layout_options import LayoutOptions
from tests.docs.pages import ROOT
from tests.exports import entries
from tests.support import Server, says, serving, user
from tokengrove.options.export import Baseline, Forest, Layout, Padding, TurnCredit
from tokengrove.reasons import Unmerged, Unrecomputable, Untrained

PAGE = (ROOT / "docs" / "trajectories.md").read_text(encoding="utf-8")
P, R = 3, 5
WIDTHS = {"[1]": 1, "[P]": P, "[R]": R, "[P + R]": P + R}


def rows(heading: str) -> list[list[str]]:
    """The table below a heading or a line of text: its cells without backquotes."""
    lines = PAGE.split(heading, 1)[1].splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith("|---"))
    table = []
    for line in lines[start + 1 :]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table


def names(cell: str) -> list[str]:
    return re.findall(r"`(\w+)`", cell)


def columns(heading: str) -> dict[str, tuple[str, int | None]]:
    return {name: (dtype, WIDTHS.get(shape)) for cell, dtype, shape, _ in rows(heading) for name in names(cell)}


OF_ROWS = {"row_advantages": ("float32", None)}
OPTIONAL = columns("### Columns that options add")


@pytest.mark.parametrize("layout", Layout)
def test_the_columns_of_a_layout_are_those_of_the_page(layout: Layout) -> None:
    padding = Padding(P, R) if layout is Layout.PADDED else None
    options = LayoutOptions(
        layout=layout, padding=padding, advantages=Baseline.GRPO, step_advantages=Baseline.LEAVE_ONE_OUT
    )
    options = replace(options, turn_advantages=TurnCredit.GIGPO)
    forest = Forest() if layout is Layout.FOREST else None
    options = replace(options, multi_modal_inputs=True, mrope=True, forest=forest)
    real = {column.name: (column.dtype.name, column.width) for column in columns_of(options)}
    listed = columns("### Layout padded") if padding else columns("### Layouts individual and concat")
    if layout is Layout.TREE:
        listed |= columns("### Layout tree")
    if forest:
        listed = columns("### Layout forest") | OPTIONAL
        assert real == {**{name: (dtype, None) for name, (dtype, _) in listed.items()}, **OF_ROWS}
        return
    rare = dict.fromkeys(["token_rewards", "unmasked_logprobs"], ("float32", P + R)) if padding else {}
    rare |= {"mrope_position_ids": ("int64", P + R)} if padding else {}
    assert real == {**listed, **OPTIONAL, **rare}


async def exported(server: Server, **options: Any) -> Any:
    return await server.ok("/trajectories/export", {"session_id": "s", **options})


async def test_labels_turns_and_the_entry_of_a_session_are_those_of_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two")) as server:
        answer = await server.answer([user("q")])
        await server.answer([user("q"), {"role": "assistant", **answer}, user("r")])
        plain = await exported(server, layout="concat")
        forest = await exported(server, layout="forest")
        padded = {"layout": "padded", "prompt_length": 64, "response_length": 64, "on_too_long": "drop"}
        more = await exported(server, **padded, include=["text", "messages"], filter={"min_version": 0})
    listed = [name for cell, *_ in rows("## Labels of a sample") for name in names(cell)]
    arrays = {*columns("### Layouts individual and concat")}
    assert {*plain["samples"][0]} == {*listed, *arrays}
    assert {*more["samples"][0]} == {*listed, *columns("### Layout padded"), "truncated_tokens", "text"}
    labels = [name for cell, *_ in rows("A sequence has these labels") for name in names(cell)]
    columns_of_forest = {*columns("### Layout forest")}
    assert {*forest["samples"][0]} == {*labels, *columns_of_forest} - {"images", "replay"}
    of_a_turn = {name for cell, *_ in rows("An entry of `turns`") for name in names(cell)}
    of_a_turn -= {"version", "output_start"}  # of a turn that is uncertain, or cut at its start
    assert {*plain["samples"][0]["turns"][0]} == {*of_a_turn}
    assert {*more["samples"][0]["turns"][0]} == {*of_a_turn, "messages", "tools", "text"}
    of_a_session = {name for cell, *_ in rows("`sessions` says for each session") for name in names(cell)}
    of_a_session -= {"group_members", "unrewarded_samples", "agent_scores", "episode_score", "teachers", "lineage"}
    assert {*entries(more)["s"]} == of_a_session - {"stale_turns"}
    assert {*entries(plain)["s"]} == of_a_session - {"dropped_samples", "stale_samples", "stale_turns"}


def test_the_page_lists_every_reason_in_its_order() -> None:
    tables = {"### Recomputable": Unrecomputable, "### What is not trained": Untrained}
    for heading, reasons in {**tables, "before them, are equal. They": Unmerged}.items():
        assert [name for cell, *_ in rows(heading) for name in names(cell)] == list(reasons)
