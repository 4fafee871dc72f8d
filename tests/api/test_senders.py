"""One sender with many choices waits for itself while others are here, and is named."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.engine.interface import PauseMode
from proxy.resources.senders import Sender
from tests.support import Server, says, serving, until, user

CROWD = Sender("127.0.0.1", "crowd")


async def queued(server: Server) -> list[str]:
    text = (await server.http.get("/metrics")).text
    return [line for line in text.splitlines() if line.startswith("tokengrove_queued_choices{")]


async def test_beside_others_the_choices_of_one_reply_run_a_few_at_a_time_and_all_are_stored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path, says(*["yes"] * 30), shared_running_requests=4) as server:
        await server.chat([user("hi")], "victim")
        await server.engine.pause(PauseMode.IN_PLACE)
        crowd = asyncio.ensure_future(server.chat([user("hi")], "crowd", n=20))
        running = server.app.state.senders.running
        await until(lambda: server.app.state.senders.queued.of.get(CROWD) == 17)
        assert len(server.engine.running) == running.of[CROWD] == 3
        assert await queued(server) == ['tokengrove_queued_choices{host="127.0.0.1",session="crowd"} 17.0']
        assert [record.message for record in caplog.records if "further ones wait" in record.message] == [
            "session 'crowd' at 127.0.0.1 has 3 choices running, and further ones wait, since others are here too: "
            "4 places are shared (--shared-running-requests). This is logged once for each session"
        ]
        victim = asyncio.ensure_future(server.chat([user("hi")], "victim"))
        await until(lambda: len(server.engine.running) == 4)
        await server.engine.resume()
        assert len((await crowd)["choices"]) == 20
        await victim
        assert running.total == 0 and await queued(server) == []
        assert len(await server.tree("crowd")) == 20


async def test_a_session_alone_runs_all_its_choices_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["yes"] * 20), shared_running_requests=4) as server:
        await server.engine.pause(PauseMode.IN_PLACE)
        crowd = asyncio.ensure_future(server.chat([user("hi")], "crowd", n=20))
        await until(lambda: len(server.engine.running) == 20)
        await server.engine.resume()
        await crowd


async def test_a_client_that_leaves_takes_its_queued_choices_with_it(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["yes"] * 30), shared_running_requests=4) as server:
        await server.chat([user("hi")], "victim")
        await server.engine.pause(PauseMode.IN_PLACE)
        crowd = asyncio.ensure_future(server.chat([user("hi")], "crowd", n=20))
        senders, turns = server.app.state.senders, server.app.state.turns
        await until(lambda: senders.queued.of.get(CROWD) == 17)
        for turn in list(turns.running._turns):
            turn.cancel()
        await asyncio.wait([crowd])
        await server.engine.resume()
        await until(lambda: not turns.running.busy)
        assert not senders.queued.of and not senders.running.of
        assert {turn["status"] for turn in await server.tree("crowd")} == {"aborted"}
        await server.chat([user("again")], "crowd")


async def test_generations_without_a_session_wait_for_places_too(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*["yes"] * 30), shared_running_requests=4) as server:
        await server.chat([user("hi")], "victim")
        await server.engine.pause(PauseMode.IN_PLACE)
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}}
        asked = [asyncio.ensure_future(server.ok("/generate", body)) for _ in range(6)]
        senders = server.app.state.senders
        await until(lambda: senders.queued.total == 3)
        assert len(server.engine.running) == 3
        await server.engine.resume()
        await asyncio.gather(*asked)
        assert not senders.queued.of and not senders.running.of
