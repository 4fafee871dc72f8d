"""`tokengrove show SESSION --trained`: from a server, from its database, and from a copy of the database."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.support import default_url, real_server, says, serving, user
from tokengrove import commands
from tokengrove.client import AsyncClient
from tokengrove.errors import ConfigurationError

WIDE = {"COLUMNS": "250", "TOKENGROVE_DATABASE_URL": ""}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The flags that read a server, and those that read its database. Nobody told of the session `plain`."""
    folder = tmp_path_factory.mktemp("trained")
    asyncio.run(_filled(folder))
    with real_server(folder) as url:
        yield f"--url {url}", f"--database-url {default_url(folder)}"


async def _filled(folder: Path) -> None:
    async with serving(folder, says("one", "two", "three")) as server, AsyncClient(app=server.app) as client:
        first = await server.answer([user("a")])
        await server.answer([user("a"), first, user("b")])
        await server.answer([user("a")], "plain")
        await server.ok("/s/rl/end_session", {})
        samples = (await client.export(session_id="s")).samples
        told = [each.logprobs + np.float32(0.5) for each in samples]
        await client.annotate(samples, 3, {"logprobs": told}, {"loss": [0.25]}, trainer="grpo")
        await client.annotate(samples, 4, {"is_masked": [each.logprobs * 0 + 1 for each in samples]}, trainer="grpo")


def run(flags: str, code: int = 0) -> str:
    ran = CliRunner().invoke(commands.app, flags.split(), env=WIDE)
    assert ran.exit_code == code, (ran.output, ran.stderr)
    return ran.output + ran.stderr


def test_each_turn_has_a_line_for_each_step_that_trained_it(served: tuple[str, str]) -> None:
    shown = run(f"show s --trained {served[0]}")
    lines = [line.split() for line in shown.splitlines() if "grpo" in line]
    assert [line[:3] for line in lines] == [
        ["0", "grpo", "3"],
        ["0", "grpo", "4"],
        ["1", "grpo", "3"],
        ["1", "grpo", "4"],
    ]
    tokens, masked, clipped, kl, ratio = lines[0][3:8]
    assert (masked, clipped, kl, ratio) == ("0", "0", "0.149", "1.65")
    assert lines[1][3:8] == [tokens, tokens, "0", "-", "-"]
    assert "logprobs" in lines[0] and lines[2][-2:] == ["loss", "0.25"]


def test_a_server_and_its_database_give_the_same_answer(served: tuple[str, str]) -> None:
    for flags in ("s --trained", "s --trained --json", "plain --trained"):
        assert run(f"show {flags} {served[0]}") == run(f"show {flags} {served[1]}")
    assert "no trainer told anything" in run(f"show plain --trained {served[1]}")
    assert len(json.loads(run(f"show s --trained --json {served[1]}"))["turns"]) == 4


def test_a_copy_of_the_database_has_what_trainers_told(served: tuple[str, str], tmp_path: Path) -> None:
    copy = f"--database-url sqlite:///{tmp_path / 'copy.db'}"
    run(f"export --all --output {tmp_path / 'backup.jsonl'} {served[1]}")
    run(f"import {tmp_path / 'backup.jsonl'} {copy}")
    assert run(f"show s --trained {copy}") == run(f"show s --trained {served[1]}")
    assert ", 0 findings" in run(f"db check {copy}")


@pytest.mark.parametrize("other", ["--samples", "--diff", "--turn 0"])
def test_the_flag_stands_alone(served: tuple[str, str], other: str) -> None:
    refused = CliRunner().invoke(commands.app, f"show s --trained {other} {served[1]}".split(), env=WIDE)
    assert isinstance(refused.exception, ConfigurationError) and "--trained" in str(refused.exception)
