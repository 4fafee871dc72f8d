"""A turn whose clients have all disconnected runs for two more seconds, so that a retry can attach to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.scripted.scripts import Fault, Reply, play
from proxy.sessions.attempts import Attempt, Stage
from proxy.store.turn_log import TurnLog
from proxy.turns import turns
from proxy.types import Interaction
from tests.support import sampled, serving, until, user
from tokengrove.reasons import Status


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


@pytest.mark.parametrize("recorded", [True, False])
async def test_after_a_choice_has_failed_the_others_still_end_when_the_client_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recorded: bool
) -> None:
    """`recorded` False: the failure is still on its way to the database when the grace period ends."""
    monkeypatch.setattr(turns, "GRACE_S", 0.01)
    stored, appended, append = asyncio.Event(), [], TurnLog.append
    stored.set()

    async def slow_append(log: TurnLog, interaction: Interaction, *more: Any) -> int | None:
        appended.append(interaction)
        await stored.wait()
        return await append(log, interaction, *more)

    monkeypatch.setattr(TurnLog, "append", slow_append)
    script = play([Reply(sampled("one two"), fault=fault, fault_after=1) for fault in (Fault.ERROR, Fault.HANG)])
    async with serving(tmp_path, script) as server:
        if not recorded:
            stored.clear()
        body = {"model": "m", "messages": [user("hi")], "n": 2}
        client = asyncio.create_task(server.post("/s/v1/chat/completions", body))
        await until(lambda: len(appended) == 1 and len(server.app.state.turns.running._turns) == 1 + (not recorded))
        client.cancel()
        await until(lambda: not server.engine.running)
        await until(lambda: len(appended) == 2)
        stored.set()
        await until(lambda: not server.app.state.turns.running._turns)
        assert [interaction.status for interaction in appended] == [Status.FAILED, Status.ABORTED]
        assert [node["status"] for node in await server.tree()] == ["failed", "aborted"]


def _attempts(turns: object) -> set[Attempt]:
    return {turn.attempt for turn in turns.running._turns}  # type: ignore[attr-defined]
