"""A reply that lost its last reader goes on for the grace period of two seconds, and is then ended."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.engine.scripted.scripts import Fault, Reply
from tests.support import sampled, serving, until, user

BODY = {"model": "m", "messages": [user("hi")]}
GRACE_S = 2.0
"""As documented: the tests of retries shorten it, so that nothing else depends on its value."""


@pytest.mark.parametrize("stream", [False, True])
async def test_a_deserted_reply_is_ended_after_two_seconds_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    loop = asyncio.get_running_loop()
    hanging = Reply(sampled("one two"), fault=Fault.HANG, fault_after=1)
    async with serving(tmp_path, lambda request: hanging) as server:
        asking = asyncio.create_task(server.post("/s/v1/chat/completions", {**BODY, "stream": stream}))
        await until(lambda: len(server.engine.running) == 1)
        with monkeypatch.context() as frozen:
            left = loop.time()
            for passed, running in ((0.0, 1), (GRACE_S - 0.001, 1), (GRACE_S + 0.001, 0)):
                frozen.setattr(loop, "time", lambda passed=passed: left + passed)
                asking.cancel()  # over ASGI, cancelling is a disconnect
                for _ in range(20):
                    await asyncio.sleep(0)
                assert len(server.engine.running) == running
        await server.app.state.turns.drain(60.0)
        assert [node["status"] for node in await server.tree()] == ["aborted"]
