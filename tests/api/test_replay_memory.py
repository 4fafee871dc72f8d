"""The rows of side columns, which may have tens of megabytes a turn, leave memory once their turn has ended."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.side_columns.columns import DECLARED
from tests.recording_engine import RecordingEngine
from tests.support import Server, assistant, sampled, says, serving, until, user
from tokengrove.errors import StoreUnavailable

EVERYTHING = ("experts", "kept", "top_logprobs")


def engine(server: Server) -> RecordingEngine:
    assert isinstance(server.engine, RecordingEngine)
    return server.engine


async def test_no_rows_are_in_memory_after_the_commit(tmp_path: Path, database_url: str) -> None:
    settings: dict[str, Any] = {"database_url": database_url, "replay": EVERYTHING, "engine_type": RecordingEngine}
    async with serving(tmp_path, says("one", "two", "three", "four", "five"), **settings) as server:
        talk = [user("hello")]
        for stream in (False, True):
            await server.post("/s/v1/chat/completions", {"model": "m", "messages": talk, "stream": stream})
            talk += [assistant("one"), user("more")]
        await server.chat([user("two choices")], n=2)
        nodes = await server.app.state.store.recordings.load_interactions("s")
        stored = await server.app.state.store.recordings.load_columns("s", DECLARED)
        assert len(stored) == len(nodes) == 4 and all(len(each) == len(DECLARED) for each in stored.values())
        assert len(engine(server).made) > 20
        assert engine(server).rows_in_memory == 0


@pytest.mark.parametrize("end", ["abort", "delete"])
async def test_only_the_rows_of_running_turns_are_in_memory(tmp_path: Path, end: str) -> None:
    script = play([Reply(sampled("one")), Reply(sampled("two three four"), fault=Fault.HANG, fault_after=2)])
    async with serving(tmp_path, script, engine_type=RecordingEngine, replay=("kept",)) as server:
        await server.chat([user("hello")])
        made = len(engine(server).made)
        hanging = asyncio.create_task(server.post("/t/v1/chat/completions", {"messages": [user("x")], "model": "m"}))
        await until(lambda: len(engine(server).made) >= made + 4)  # of two tokens
        await asyncio.sleep(0)
        assert engine(server).rows_in_memory == 4
        if end == "abort":
            await server.engine.abort(server.engine.running[0])
        else:
            assert (await server.http.delete("/rl/sessions/t")).status_code == 200
        assert (await hanging).is_error
        del hanging
        await until(lambda: not server.app.state.turns.running.count)
        assert engine(server).rows_in_memory == 0


@pytest.mark.parametrize(("fault", "after", "chunks"), [("error", 0, 0), ("error", 3, 3), ("bad_lengths", 0, 1)])
async def test_a_failed_turn_leaves_no_rows_in_memory(tmp_path: Path, fault: str, after: int, chunks: int) -> None:
    script = play([Reply(sampled("one two three four"), fault=Fault(fault), fault_after=after)])
    async with serving(tmp_path, script, engine_type=RecordingEngine, replay=EVERYTHING) as server:
        body = {"model": "m", "messages": [user("hello")]}
        assert (await server.post("/s/v1/chat/completions", body)).is_error
        assert len(engine(server).made) == 2 * chunks
        assert engine(server).rows_in_memory == 0


async def test_a_turn_that_the_database_does_not_take_leaves_no_rows_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed turn waits until the database takes it, without its rows."""
    async with serving(tmp_path, says("one", "two"), engine_type=RecordingEngine, replay=EVERYTHING) as server:
        await server.chat([user("hello")])

        def refuse(*_: Any, **__: Any) -> None:
            raise StoreUnavailable("the database is away")

        with monkeypatch.context() as away:
            away.setattr(server.app.state.store.turns, "append", refuse)
            assert (await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("b")]})).is_error
        assert len(server.app.state.turns._commits._unrecorded) == 1
        assert engine(server).rows_in_memory == 0
