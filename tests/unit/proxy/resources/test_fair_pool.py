"""Worker threads that are shared fairly."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import pytest

from proxy.resources.fair_pool import LARGE, FairPool, _Work
from proxy.resources.memory import FreedMemory
from proxy.resources.senders import Sender


class Gated:
    """Functions that block until they are let go, and note the order in which they began."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self._events: dict[str, threading.Event] = {}
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def work(self, name: str) -> str:
        event = self._events.setdefault(name, threading.Event())
        self.begun.append(name)
        self._loop.call_soon_threadsafe(self._changed.set)
        event.wait(30)
        return name

    def let_go(self, *names: str) -> None:
        for name in names:
            self._events.setdefault(name, threading.Event()).set()

    async def until_begun(self, count: int) -> list[str]:
        while len(self.begun) < count:
            self._changed.clear()
            await self._changed.wait()
        return self.begun


class Freed(FreedMemory):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def expect(self) -> None:
        self.calls += 1


@pytest.fixture
def pool() -> Iterator[FairPool]:
    made = FairPool(2, Freed())
    yield made
    made.close()


async def test_sessions_take_turns_for_the_threads(pool: FairPool) -> None:
    gated = Gated()
    names = ["a1", "a2", "a3", "a4", "b1", "c1"]
    tasks = [asyncio.create_task(pool.run(Sender(name=name[0]), 10, gated.work, name)) for name in names]
    await gated.until_begun(2)
    gated.let_go(*names[1:])  # one thread is left for all others
    assert await asyncio.gather(*tasks[1:]) == names[1:]
    assert gated.begun[2:] == ["a3", "b1", "c1", "a4"]
    gated.let_go("a1")
    await tasks[0]


async def test_large_work_never_has_all_threads(pool: FairPool) -> None:
    gated = Gated()
    large = [
        asyncio.create_task(pool.run(Sender(name=f"s{number}"), LARGE, gated.work, f"large {number}"))
        for number in range(3)
    ]
    await gated.until_begun(1)
    for number in range(5):
        gated.let_go(f"small {number}")
        assert await pool.run(Sender(name="other"), LARGE - 1, gated.work, f"small {number}") == f"small {number}"
    assert [name for name in gated.begun if name.startswith("large")] == ["large 0"]
    gated.let_go("large 0", "large 1", "large 2")
    await asyncio.gather(*large)
    assert [name for name in gated.begun if name.startswith("large")] == ["large 0", "large 1", "large 2"]


async def test_who_gives_up_while_waiting_leaves_the_queue_and_never_runs(pool: FairPool) -> None:
    gated = Gated()
    running = [asyncio.create_task(pool.run(Sender(name="a"), 1, gated.work, name)) for name in ("one", "two")]
    await gated.until_begun(2)
    waiting = asyncio.create_task(pool.run(Sender(name="a"), 1, gated.work, "never"))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gated.let_go("one", "two", "three")
    await asyncio.gather(*running)
    assert await pool.run(Sender(name="a"), 1, gated.work, "three") == "three"
    assert gated.begun == ["one", "two", "three"]


async def test_who_gives_up_while_running_keeps_the_thread_until_the_function_ends(pool: FairPool) -> None:
    gated = Gated()
    running = [asyncio.create_task(pool.run(Sender(name="a"), 1, gated.work, name)) for name in ("one", "two")]
    await gated.until_begun(2)
    running[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await running[0]
    waiting = asyncio.create_task(pool.run(Sender(name="a"), 1, gated.work, "three"))
    await asyncio.sleep(0)
    assert gated.begun == ["one", "two"]
    gated.let_go("one", "three")
    assert await waiting == "three"
    gated.let_go("two")
    await running[1]


async def test_a_thread_that_is_freed_as_a_waiting_caller_is_cancelled_goes_to_the_next(pool: FairPool) -> None:
    gated = Gated()
    running = [asyncio.create_task(pool.run(Sender(name="a"), 1, gated.work, name)) for name in ("one", "two")]
    await gated.until_begun(2)
    waiting = [asyncio.create_task(pool.run(Sender(name=owner), 1, gated.work, owner)) for owner in ("b", "c")]
    await asyncio.sleep(0)
    waiting[0].cancel()
    pool._end(
        _Work(Sender(name="a"), 1, asyncio.get_running_loop().create_future())
    )  # in the same pass of the event loop, before the cancelled caller has run
    pool._running += 1
    pool._work.add(Sender(name="a"), 1)
    gated.let_go("one", "two", "b", "c")
    assert await waiting[1] == "c"
    await asyncio.gather(*running)
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert pool._running == 0 and pool.waiting == 0 and pool._work.total == 0


async def test_an_error_of_the_function_is_raised_and_frees_the_thread(pool: FairPool) -> None:
    def fails() -> None:
        raise ValueError("no")

    for _ in range(5):
        with pytest.raises(ValueError, match="no"):
            await pool.run(Sender(name="a"), 1, fails)


async def test_memory_is_given_back_after_work(pool: FairPool) -> None:
    freed = pool._freed
    assert isinstance(freed, Freed)
    for calls in (1, 2):
        await pool.run(Sender(name="a"), LARGE, len, "x")
        assert freed.calls == calls
