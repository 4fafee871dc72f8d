"""`tokengrove show SESSION --turn N --tokens`: the side columns of sampled tokens, from a server and its database."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.recording import experts_at, kept_at, recording
from tests.support import default_url, real_server, user
from tokengrove import commands

WIDE = {"COLUMNS": "250", "TOKENGROVE_DATABASE_URL": ""}
LONG = "word " * 160


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The flags that read a server, and those that read its database. Session `plain` recorded nothing."""
    folder = tmp_path_factory.mktemp("columns")
    asyncio.run(_filled(folder))
    with real_server(folder) as url:
        yield f"--url {url}", f"--database-url {default_url(folder)}"


async def _filled(folder: Path) -> None:
    async with recording(folder, "the lazy dog", LONG) as server:
        await server.answer([user("Say it.")])
        await server.answer([user("Say much.")], "long", max_tokens=600)
    async with recording(folder, "nothing more", replay=[]) as server:
        await server.answer([user("Say it.")], "plain")


def _show(place: str, flags: str) -> str:
    ran = CliRunner().invoke(commands.app, ["show", *flags.split(), *place.split()], env=WIDE)
    assert ran.exit_code == 0, (ran.output, ran.stderr)
    return ran.output


def test_each_sampled_token_has_its_kept_set_mass_and_experts_in_a_line(served: tuple[str, str]) -> None:
    answer = json.loads(_show(served[0], "s --turn 0 --tokens --json"))
    start, ids, size = answer["prompt_tokens"], answer["tokens"]["ids"], answer["columns"]["vocab_size"]
    shown = _show(served[0], "s --turn 0 --tokens").splitlines()
    table = shown[next(at for at, line in enumerate(shown) if "experts of each layer" in line) + 1 :]
    assert len(table) == len(ids) - start == answer["output_tokens"]
    for position, line in enumerate(table, start):
        assert line.split()[0] == str(position)
        kept = kept_at(position, ids[position], size)
        if kept is None:
            assert "missing" in line
        else:
            number = f"all but {size - len(kept):,}" if 2 * len(kept) > size else f"{len(kept):,}"
            assert f" {number} of {size:,} " in line
        experts = " | ".join(" ".join(map(str, layer)) for layer in experts_at(position))
        assert (experts if position < len(ids) - 1 else "missing") in line


def test_a_database_shows_the_rows_of_its_server_with_ids_for_texts(served: tuple[str, str]) -> None:
    server, database = (json.loads(_show(place, "s --turn 0 --tokens --json"))["columns"] for place in served)
    assert database["experts"] == server["experts"] and database["vocab_size"] is None
    for ours, theirs in zip(database["kept"], server["kept"], strict=True):
        assert ours == (theirs and {**theirs, "texts": [None] * len(theirs["ids"])})
    shown = _show(served[1], "s --turn 0 --tokens")
    for row in filter(None, database["kept"]):
        assert re.search(rf" {row['number']:,} +{row['mass']:.3g} +(not )?{' '.join(map(str, row['ids'][:5]))} ", shown)


def test_only_the_first_rows_are_shown_unless_the_whole_is_asked_for(served: tuple[str, str]) -> None:
    answer = json.loads(_show(served[0], "long --turn 0 --tokens --json --whole"))
    number, start = answer["output_tokens"], answer["prompt_tokens"]
    assert number > 256 and len(answer["columns"]["experts"]) == len(answer["columns"]["kept"]) == number
    assert answer["columns"]["experts"][:-1] == [experts_at(start + at) for at in range(number - 1)]
    assert _show(served[0], "long --turn 0 --tokens").endswith(f"\n… and {number - 32} more: --whole\n")
    assert "more: --whole" not in _show(served[0], "long --turn 0 --tokens --whole")


def test_a_turn_that_recorded_nothing_has_no_columns(served: tuple[str, str]) -> None:
    for place in served:
        assert "columns" not in json.loads(_show(place, "plain --turn 0 --tokens --json"))
        assert "experts" not in _show(place, "plain --turn 0 --tokens")


def test_a_turn_says_what_it_recorded_and_what_is_missing(served: tuple[str, str]) -> None:
    for place in served:
        missing = json.loads(_show(place, "s --turn 0 --json"))["notes"]["replay"]["kept"]
        (line,) = [line for line in _show(place, "s --turn 0").splitlines() if line.startswith("recorded")]
        assert f"kept ({missing} missing), kept logprobs, routed experts, top token ids, top logprobs" in line
        assert missing > 0
        assert "recorded" not in _show(place, "plain --turn 0")
