"""A server that stops tells the clients of the turns that it cuts off what happened, and what to do."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from tests.support import sampled, serving, until, user


@pytest.mark.parametrize("stream", [False, True])
async def test_a_turn_cut_off_by_the_shutdown_names_it_and_the_way_out(tmp_path: Path, stream: bool) -> None:
    script = play([Reply(sampled("one two three"), fault=Fault.HANG, fault_after=2)])
    async with serving(tmp_path, script) as server:
        body = {"model": "m", "messages": [user("hi")], "stream": stream}
        turn = asyncio.create_task(server.post("/s/v1/chat/completions", body))
        await until(lambda: any(turn.interaction.output_ids for turn in server.app.state.turns.running._turns))
        await server.app.state.turns.drain(0.0)
        text = (await turn).text
        error = json.loads(text.split("data: ")[-1] if stream else text)["error"]
        assert error["code"] == "engine_unavailable"
        assert error["message"] == (
            "the server is shutting down; send the request to another replica, or again after the restart"
        )
        (node,) = await server.tree()
        assert (node["status"], node["error"]) == ("aborted", "cancelled: the server shut down")
