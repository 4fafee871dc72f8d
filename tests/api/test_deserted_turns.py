"""A turn whose clients have all disconnected runs for two more seconds, so that a retry can attach to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.sessions.attempts import Attempt, Stage
from tests.support import sampled, serving, until, user


async def steps_until(condition: Callable[[], bool]) -> bool:
    """Run the event loop without letting time pass. Return whether the condition came true."""
    for _ in range(1000):
        if condition():
            return True
        await asyncio.sleep(0)
    return False


async def test_a_turn_without_clients_is_cancelled_after_two_seconds_and_not_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = play([Reply(sampled("one two"), fault=Fault.HANG, fault_after=1)])
    async with serving(tmp_path, script) as server:
        client = asyncio.create_task(server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")]}))
        await until(lambda: bool(server.engine.running))
        (attempt,) = _attempts(server.app.state.turns)
        loop = asyncio.get_running_loop()
        left_at = loop.time()
        with monkeypatch.context() as clock:
            clock.setattr(loop, "time", lambda: left_at)
            client.cancel()
            assert await steps_until(lambda: attempt.grace is not None)
            await steps_until(lambda: False)  # the grace period begins
            clock.setattr(loop, "time", lambda: left_at + 1.99)
            assert not await steps_until(lambda: attempt.stage is not Stage.RUNNING)
            clock.setattr(loop, "time", lambda: left_at + 2.01)
            assert await steps_until(lambda: attempt.stage is not Stage.RUNNING)
        await until(lambda: not server.engine.running)


def _attempts(turns: object) -> set[Attempt]:
    return {turn.attempt for turn in turns._running}  # type: ignore[attr-defined]
