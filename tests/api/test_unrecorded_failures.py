"""Failed turns that the database refuses wait in memory, all of them: beyond a bound no turn starts."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.store.sql import rows
from proxy.store.turn_log import TurnLog
from proxy.turns import commits
from proxy.types import Interaction
from tests.databases import execute
from tests.support import Server, default_url, sampled, serving, until, user
from tokengrove.errors import StoreUnavailable

MOST = 3


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """While this is not empty, the database refuses each commit of a turn."""
    append, refusing = TurnLog.append, [None]

    async def refused(log: TurnLog, *turn: Any) -> int | None:
        if refusing:
            raise StoreUnavailable("down")
        return await append(log, *turn)

    monkeypatch.setattr(TurnLog, "append", refused)
    monkeypatch.setattr(commits, "_MOST_UNRECORDED", MOST)
    return refusing


def failures(then: int = 0) -> Any:
    return play([*[Reply(sampled("A."), fault=Fault.ERROR)] * MOST, *[Reply(sampled("B."))] * then])


async def fail(server: Server) -> None:
    for number in range(MOST):
        assert (await asked(server, str(number))).is_error


async def asked(server: Server, text: str) -> Any:
    return await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user(text)]})


def stored(folder: Path) -> list[Any]:
    return sorted(status for (status,) in execute(default_url(folder), "SELECT status FROM interactions"))


async def test_no_turn_starts_while_too_many_failures_wait_and_none_of_them_is_lost(
    tmp_path: Path, refusing: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, failures(then=1)) as server:
        await fail(server)
        assert "failed turns wait for the database, so no new ones start" in caplog.text
        assert "tokengrove_unrecorded_turns 3.0" in (await server.http.get("/metrics")).text
        refused = await asked(server, "next")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        assert len(server.engine.requests) == MOST
        refusing.clear()
        server.app.state.turns._commits._record_at = 0.0
        await asked(server, "next")  # is refused too, and has the failures recorded
        await until(lambda: stored(tmp_path) == ["failed"] * MOST)
        await until(lambda: not server.app.state.turns._commits._unrecorded)
        assert (await asked(server, "next")).status_code == 200
        assert (await server.http.get("/rl/sessions/s")).json()["begun_not_ended"] == 0


async def test_failures_that_wait_are_recorded_before_the_server_stops(tmp_path: Path, refusing: list[None]) -> None:
    async with serving(tmp_path, failures()) as server:
        await fail(server)
        refusing.clear()
    assert stored(tmp_path) == ["failed"] * MOST


async def test_a_failure_that_is_refused_alone_holds_up_no_other(
    tmp_path: Path, refusing: list[None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, failures()) as server:
        await fail(server)
        refusing.clear()
        first, insert = server.app.state.turns._commits._unrecorded[0].interaction.id, rows.interaction_row

        def damaged(node: Interaction, seq: int) -> rows.RowValues:
            if node.id == first:
                raise KeyError("planted")
            return insert(node, seq)

        monkeypatch.setattr(rows, "interaction_row", damaged)
    assert stored(tmp_path) == ["failed"] * (MOST - 1)


async def test_a_server_that_stops_says_how_many_failures_it_could_not_record(
    tmp_path: Path, refusing: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    async with serving(tmp_path, failures()) as server:
        await fail(server)
    assert "failed turns could not be recorded" in caplog.text
    assert execute(default_url(tmp_path), "SELECT count(*) FROM intents") == [(MOST,)]
