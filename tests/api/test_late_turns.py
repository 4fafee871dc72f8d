"""Turns that begin while the server stops, and turns that are cancelled before their tasks have run."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.interface import PauseMode
from proxy.engine.scripted.scripts import Reply, play
from proxy.turns.turns import Turns
from tests.support import sampled, says, serving, until, user


async def test_a_turn_that_is_cancelled_before_it_runs_is_told_and_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = Turns._start

    def start_and_cancel(self: Turns, plan: Any, choices: Any) -> None:
        start(self, plan, choices)
        for turn in choices:
            turn.cancel()

    async with serving(tmp_path, says("one", "two", "three")) as server:
        with monkeypatch.context() as patched:
            patched.setattr(Turns, "_start", start_and_cancel)
            body = {"model": "m", "messages": [user("a")], "n": 2}
            response = await server.post("/s/v1/chat/completions", body)
        assert response.status_code == 503, response.text
        assert [turn["status"] for turn in await server.tree()] == ["aborted", "aborted"]
        assert not server.app.state.turns.running.busy
        await server.chat([user("a")])


async def test_a_turn_that_begins_while_the_server_stops_may_finish(tmp_path: Path) -> None:
    slowly = play([Reply(sampled("one")), Reply(sampled("two"), delay_s=0.01)])
    async with serving(tmp_path, slowly, shared_running_requests=1) as server:
        turns = server.app.state.turns
        await server.engine.pause(PauseMode.IN_PLACE)
        first = asyncio.ensure_future(server.chat([user("a")], "first"))
        await until(lambda: len(server.engine.running) == 1)
        draining = asyncio.ensure_future(turns.drain(30.0))
        await asyncio.sleep(0)
        late = asyncio.ensure_future(server.chat([user("b")], "late"))
        await until(lambda: server.app.state.senders.queued.total == 1)  # so it runs once the first has been committed
        await server.engine.resume()
        assert (await first)["choices"][0]["message"]["content"] == "one"
        assert (await late)["choices"][0]["message"]["content"] == "two"
        assert await draining == 0
