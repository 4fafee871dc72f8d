"""However requests arrive, only a few turns begin in one pass of the event loop."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from proxy.resources import turnstile
from proxy.resources.senders import Sender
from proxy.resources.turnstile import Turnstile
from tests.support import LoopPasses


@pytest.mark.parametrize("seed", range(20))
async def test_no_more_turns_begin_in_a_pass_however_they_arrive(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstile, "_AT_ONCE", 3)
    dice, gate, begun, passes = random.Random(seed), Turnstile(), Counter[int](), LoopPasses(monkeypatch)

    async def turn(wait: int) -> None:
        for _ in range(wait):
            await asyncio.sleep(0)
        await gate.enter(Sender(dice.choice("ab"), dice.choice("cd")))
        begun[passes.count] += 1

    await asyncio.gather(*(turn(dice.randrange(12)) for _ in range(dice.randrange(1, 60))))
    assert max(begun.values()) <= 3
