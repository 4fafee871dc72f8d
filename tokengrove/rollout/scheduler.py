"""Plays episodes concurrently: the scheduler of runs, of verl's batches, and of the groups of TRL and AReaL.

Slots are read as there is room, so their source may be endless. When `run` returns or raises, no episode is running:
after an error, a stop or a cancellation, running episodes are cancelled and awaited.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.failure_log import TooManyFailedEpisodes

if TYPE_CHECKING:  # the systems that only use the scheduler import neither
    from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
    from tokengrove.rollout.executors import Executor

Slot = TypeVar("Slot")
OnAttempt = Callable[["EpisodeResult", bool], Coroutine[Any, Any, None]]
"""Called with the result of an attempt, and with whether the episode is retried."""

INFRASTRUCTURE = ("server", "worker")
"""Failures of shared resources. A retry after one of them waits."""
FIRST_PAUSE_S = 1.0
"""Seconds before the first such retry; they double with each, up to 30 s."""
_LONGEST_PAUSE_S = 30.0


class Scheduler(Generic[Slot]):
    """Calls `play` once for each slot, at most `concurrency` at once. For one event loop and one `run`.

    `play` plays an episode, or a group of them, and keeps the result. An exception of `play` ends the run.
    """

    def __init__(self, play: Callable[[Slot], Coroutine[Any, Any, None]], concurrency: int) -> None:
        self._play = play
        self._room = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[None]] = set()
        self._over = asyncio.Event()
        self._error: BaseException | None = None
        self._cancelled = False

    async def run(self, slots: Iterable[Slot]) -> None:
        """Play all slots, or those that were started before `stop`.

        Raises the first exception of `play` or `slots`; TooManyFailedEpisodes takes precedence over others at once.
        """
        if not self._over.is_set():
            self._begin(self._feed(slots))
        try:
            await self._over.wait()
        finally:
            await to_the_end(self._cancel())
        if self._error is not None:
            raise self._error

    def stop(self) -> None:
        """Start no more slots, and cancel the running ones. `play` itself may call it."""
        self._over.set()
        if not self._cancelled:  # a second cancellation would interrupt the clean-up of tasks
            self._cancelled = True
            for task in self._tasks:
                task.cancel()

    async def _feed(self, slots: Iterable[Slot]) -> None:
        source = iter(slots)
        while True:
            await self._room.acquire()
            if self._over.is_set():
                return
            try:
                slot = next(source)
            except StopIteration:
                return
            if self._over.is_set():  # the source stopped the run
                return
            self._begin(self._play(slot)).add_done_callback(lambda _: self._room.release())

    def _begin(self, step: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(step)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = _error_of(task)
        if error is not None and (self._error is None or isinstance(error, TooManyFailedEpisodes)):
            self._error = error
        if error is not None or not self._tasks:
            self._over.set()

    async def _cancel(self) -> None:
        self.stop()
        while self._tasks:
            await asyncio.wait(self._tasks)


async def play_with_retries(
    executor: Executor,
    plan_of: Callable[[int, bool], EpisodePlan],
    retries: int,
    retry_on: Collection[str],
    on_attempt: OnAttempt | None = None,
) -> EpisodeResult:
    """Play an episode, and retry it up to `retries` times after a failure in `retry_on`; return the last result.

    `plan_of(number, is_last)` creates the plan of an attempt, with a new session; `number` counts from 0. `on_attempt`
    is awaited after each attempt, to its end if this is cancelled. It is not awaited after the failure `cancelled`,
    which an executor returns when it is closed.
    """
    for number in range(retries + 1):
        is_last = number == retries
        result = await executor.play(plan_of(number, is_last))
        if result.failure == "cancelled":
            break
        again = not is_last and result.failure in retry_on
        if on_attempt is not None:
            await to_the_end(on_attempt(result, again))
        if not again:
            break
        if result.failure in INFRASTRUCTURE:
            await asyncio.sleep(min(FIRST_PAUSE_S * 2**number, _LONGEST_PAUSE_S))
    return result


def _error_of(task: asyncio.Task[None]) -> BaseException | None:
    """The exception of a task, or None. A CancelledError is an error only if nobody cancelled the task."""
    if not task.cancelled():
        return task.exception()
    return None if task.cancelling() else RuntimeError("an episode was cancelled from inside")
