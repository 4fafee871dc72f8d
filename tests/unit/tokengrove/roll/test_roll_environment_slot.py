"""A slot plays on whatever becomes of those who wait for its episodes."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tokengrove.client import Client
from tokengrove.roll.episodes.environment_slot import EnvironmentSlot


class _Manager:
    """Plays episodes when it is let, and notes how many it has handed back."""

    def __init__(self, slot: EnvironmentSlot) -> None:
        self._slot, self.env_config = slot, dict[str, Any]()
        self.group_seed = self.handed_back = 0
        self.may_end, self.over = threading.Event(), threading.Event()

    def run_rollout_loop(self, data: Any) -> None:
        try:
            while (number := self._slot.get_episode_id(0)) is not None:
                self.may_end.wait()
                self._slot.put(0, number, 0, None)
                self.handed_back += 1
        finally:
            self.over.set()


async def test_an_episode_that_nobody_waits_for_any_more_does_not_break_the_loop_of_its_manager() -> None:
    made: list[_Manager] = []

    def make(giver: Any, slot: EnvironmentSlot) -> _Manager:
        made.append(_Manager(slot))
        return made[0]

    with Client("http://127.0.0.1:9") as client:
        slot = EnvironmentSlot(make, client, "a-slot")
        names = ("session_id", "api_key", "control_key", "base_url", "root_url", "keys_expire_at")
        session: Any = SimpleNamespace(**dict.fromkeys(names, "s"))
        waiting = asyncio.ensure_future(asyncio.wrap_future(slot.play(0, 1, session)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0)  # the cancellation goes on to the future of the thread
        slot.play(0, 2, session)
        made[0].may_end.set()
        await asyncio.to_thread(slot.close, 10.0)
        assert made[0].over.is_set() and made[0].handed_back == 2
