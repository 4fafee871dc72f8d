"""The scheduler: room, errors, stops and cancellations, after which nothing runs."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import count

import pytest

from tokengrove.rollout.failure_log import TooManyFailedEpisodes
from tokengrove.rollout.scheduler import Scheduler


class Episodes:
    """Slots are numbers. An episode runs until `opened`, then raises what `errors` has for it."""

    def __init__(self, **errors: BaseException) -> None:
        self.errors = {int(name.removeprefix("at_")): error for name, error in errors.items()}
        self.opened = asyncio.Event()
        self.begun, self.ended, self.cancelled = list[int](), list[int](), list[int]()
        self.most = 0

    async def play(self, slot: int) -> None:
        self.begun.append(slot)
        self.most = max(self.most, len(self.begun) - len(self.ended))
        try:
            await asyncio.sleep(0)
            await self.opened.wait()
            if slot in self.errors:
                raise self.errors[slot]
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # what it does at its end
            self.cancelled.append(slot)
            raise
        finally:
            self.ended.append(slot)


def read_slots(read: list[int]) -> Iterator[int]:
    for slot in count():
        read.append(slot)
        yield slot


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_slots_are_played_with_at_most_so_many_at_once() -> None:
    episodes = Episodes()
    episodes.opened.set()
    await Scheduler(episodes.play, 3).run(range(20))
    assert sorted(episodes.ended) == list(range(20)) and episodes.most == 3


async def test_no_slot_ends_a_run_at_once() -> None:
    await Scheduler(Episodes().play, 3).run([])


async def test_an_endless_source_is_read_as_there_is_room() -> None:
    episodes, read = Episodes(), list[int]()
    scheduler = Scheduler(episodes.play, 2)
    running = asyncio.create_task(scheduler.run(read_slots(read)))
    await settled()
    assert read == [0, 1]
    scheduler.stop()
    await running
    assert sorted(episodes.cancelled) == [0, 1]


async def test_the_first_error_is_raised_once_all_others_have_ended() -> None:
    episodes = Episodes(at_1=ValueError("one"))

    async def play(slot: int) -> None:
        if slot == 1:
            await episodes.play(slot)
        else:
            await waiting.play(slot)

    waiting = Episodes()
    episodes.opened.set()
    with pytest.raises(ValueError, match="one"):
        await Scheduler(play, 4).run(range(4))
    assert sorted(waiting.cancelled) == waiting.begun == sorted(waiting.ended) == [0, 2, 3]


async def test_of_several_errors_at_once_the_end_of_the_run_is_raised() -> None:
    episodes = Episodes(at_0=ValueError("zero"), at_1=TooManyFailedEpisodes("too many"), at_2=ValueError("two"))
    running = asyncio.create_task(Scheduler(episodes.play, 3).run(range(3)))
    await settled()
    episodes.opened.set()
    with pytest.raises(TooManyFailedEpisodes):
        await running


async def test_an_error_of_the_source_cancels_what_plays_and_is_raised() -> None:
    def slots() -> Iterator[int]:
        yield 0
        raise ValueError("no rows")

    episodes = Episodes()
    with pytest.raises(ValueError, match="no rows"):
        await Scheduler(episodes.play, 2).run(slots())
    assert episodes.begun == episodes.ended


async def test_an_episode_may_stop_the_run_and_no_other_is_begun() -> None:
    begun = list[int]()

    async def play(slot: int) -> None:
        begun.append(slot)
        if slot == 1:
            scheduler.stop()
        await asyncio.sleep(0)

    scheduler = Scheduler(play, 1)
    await scheduler.run(range(5))
    assert begun == [0, 1]


async def test_a_run_that_was_stopped_before_it_began_plays_nothing() -> None:
    episodes = Episodes()
    scheduler = Scheduler(episodes.play, 1)
    scheduler.stop()
    await scheduler.run(range(5))
    assert episodes.begun == []


async def test_a_cancelled_run_returns_once_its_episodes_have_ended() -> None:
    episodes = Episodes()
    running = asyncio.create_task(Scheduler(episodes.play, 2).run(range(5)))
    await settled()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(episodes.cancelled) == sorted(episodes.ended) == [0, 1]


async def test_an_episode_that_cancels_itself_is_an_error() -> None:
    async def play(slot: int) -> None:
        raise asyncio.CancelledError

    with pytest.raises(RuntimeError, match="cancelled from inside"):
        await Scheduler(play, 1).run(range(3))


async def test_no_slot_is_read_after_an_error() -> None:
    read = list[int]()

    async def play(slot: int) -> None:
        await asyncio.sleep(0)
        raise ValueError(slot)

    with pytest.raises(ValueError, match="0"):
        await Scheduler(play, 1).run(read_slots(read))
    assert read == [0]


async def test_a_source_may_stop_the_run() -> None:
    episodes = Episodes()

    def slots() -> Iterator[int]:
        yield 0
        scheduler.stop()
        yield 1

    scheduler = Scheduler(episodes.play, 2)
    await scheduler.run(slots())
    assert 1 not in episodes.begun
