"""Turns that arrive together begin over several passes of the event loop."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from proxy.api import turnstile
from proxy.api.turnstile import Turnstile

AT_ONCE = 3


class Passes:
    """Counts the passes of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._next()

    def _next(self) -> None:
        self.count += 1
        asyncio.get_running_loop().call_soon(self._next)


async def enter_all(gate: Turnstile, count: int) -> tuple[list[asyncio.Task[None]], list[tuple[int, int]]]:
    """Begin tasks that enter, and return them with a list that grows by (pass, number) as each has entered."""
    passes, entered = Passes(), list[tuple[int, int]]()

    async def enter(number: int) -> None:
        await gate.enter()
        entered.append((passes.count, number))

    return [asyncio.create_task(enter(number)) for number in range(count)], entered


@pytest.fixture(autouse=True)
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turnstile, "_AT_ONCE", AT_ONCE)


async def test_turns_that_arrive_together_begin_a_few_in_each_pass_of_the_loop() -> None:
    tasks, entered = await enter_all(Turnstile(), 10)
    await asyncio.gather(*tasks)
    passes = [number for number, _ in entered]
    assert max(passes.count(number) for number in passes) == AT_ONCE
    assert len(set(passes)) == 4


async def test_turns_that_arrive_together_begin_in_order() -> None:
    tasks, entered = await enter_all(Turnstile(), 14)
    await asyncio.gather(*tasks)
    assert [number for _, number in entered] == list(range(14))


async def test_a_turn_alone_begins_at_once() -> None:
    gate = Turnstile()
    for _ in range(2 * AT_ONCE):
        with pytest.raises(StopIteration):
            gate.enter().send(None)
        await asyncio.sleep(0)
        await asyncio.sleep(0)


async def test_a_turn_that_is_cancelled_while_it_waits_takes_no_place() -> None:
    tasks, entered = await enter_all(Turnstile(), 12)
    await asyncio.sleep(0)
    for task in tasks[AT_ONCE : 2 * AT_ONCE]:
        task.cancel()
    for task in tasks:
        with suppress(asyncio.CancelledError):
            await task
    assert [number for _, number in entered] == [*range(AT_ONCE), *range(2 * AT_ONCE, 12)]
    passes = [number for number, _ in entered]
    assert max(passes.count(number) for number in passes) == AT_ONCE
