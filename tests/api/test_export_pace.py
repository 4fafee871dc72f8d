"""Exports leave room for turns: they encode in threads, and while turns run they sleep after each slice of work."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Never

import pytest

from proxy.api import export_endpoint, pace
from proxy.api.pace import Pace
from proxy.export_formats import text
from proxy.export_formats.create_encoder import ExportFormat, encoder
from proxy.store.sql import rows
from proxy.trajectory.layout_options import LayoutOptions
from tests.api.test_export import always, chain
from tests.support import Server, serving, until, user


class Touched(Exception):
    pass


class Rows(Sequence[Any]):
    """Rows that record when an encoder reads them."""

    def __getitem__(self, index: Any) -> Never:
        raise Touched

    def __len__(self) -> Never:
        raise Touched


@pytest.mark.parametrize("name", list(ExportFormat))
def test_a_session_is_encoded_only_when_its_piece_is_requested(name: ExportFormat) -> None:
    encoding = encoder(name, LayoutOptions())
    try:
        pieces = encoding.add(Rows(), {})
        with pytest.raises(Touched):
            next(pieces)
    finally:
        encoding.close()


@pytest.mark.parametrize(("turns_run", "rests"), [(True, [2.5]), (False, [])])
async def test_while_turns_run_each_slice_is_followed_by_a_sleep_of_its_length(
    monkeypatch: pytest.MonkeyPatch, turns_run: bool, rests: list[float]
) -> None:
    clock, rested = [10.0], []

    async def slice_() -> str:
        clock[0] += 2.5
        return "done"

    async def sleep(seconds: float) -> None:
        rested.append(seconds)

    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(pace.asyncio, "sleep", sleep)
    assert await Pace(lambda: turns_run).work(slice_()) == "done"
    assert rested == rests


async def waiting_turn(server: Server) -> asyncio.Task[Any]:
    """Begin a turn that runs as long as the server is paused."""
    turn = asyncio.create_task(server.chat([user("other")], session="other"))
    await until(lambda: bool(server.app.state.turns.running.busy))
    return turn


@pytest.mark.parametrize("name", list(ExportFormat))
async def test_loading_a_session_and_encoding_each_piece_are_followed_by_a_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: ExportFormat
) -> None:
    rests: list[float] = []

    async def rest(seconds: float) -> None:
        rests.append(seconds)

    async with serving(tmp_path, always()) as server:
        sessions = ["a", "b", "c"]
        for session in sessions:
            await chain(server, session)
        monkeypatch.setattr(pace, "asyncio", SimpleNamespace(sleep=rest))
        await server.ok("/engine/pause_generation", {})
        turn = await waiting_turn(server)
        assert (await server.post("/export_trajectories", {"format": name, "session_ids": sessions})).status_code == 200
        await server.ok("/engine/continue_generation", {})
        await turn
    # Slices: loading each session, its pieces and their end, and the end of the answer.
    assert len(rests) > 2 * len(sessions) + 1


async def test_an_export_reads_and_lays_out_sessions_outside_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    working: dict[str, set[int]] = {"read": set(), "lay out": set(), "encode": set()}

    def noting(part: str, function: Any) -> Any:
        def noted(*args: Any, **named: Any) -> Any:
            working[part].add(threading.get_ident())
            return function(*args, **named)

        return noted

    monkeypatch.setattr(rows, "interaction_of", noting("read", rows.interaction_of))
    monkeypatch.setattr(export_endpoint, "lay_out", noting("lay out", export_endpoint.lay_out))
    monkeypatch.setattr(text, "dumps", noting("encode", text.dumps))
    async with serving(tmp_path, always()) as server:
        await chain(server)
        await server.ok("/export_trajectories", {"format": "json", "session_ids": ["s"]})
    assert all(working.values())
    assert not any(threading.get_ident() in threads for threads in working.values())


@pytest.mark.parametrize("name", list(ExportFormat))
async def test_an_export_beside_a_turn_that_waits_is_the_same_to_the_byte(tmp_path: Path, name: ExportFormat) -> None:
    async with serving(tmp_path, always()) as server:
        await chain(server)
        body = {"format": name, "session_ids": ["s"]}
        alone = await server.post("/export_trajectories", body)
        await server.ok("/engine/pause_generation", {})
        turn = await waiting_turn(server)
        beside = await server.post("/export_trajectories", body)
        await server.ok("/engine/continue_generation", {})
        assert (await turn)["choices"]
        assert (alone.status_code, alone.content) == (beside.status_code, beside.content)
