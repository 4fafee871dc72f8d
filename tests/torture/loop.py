"""An event loop whose order of events is chosen by a seed, with a virtual clock.

One of the ready callbacks is picked at a time. Only the callbacks of one future keep the order that asyncio promises
them. Time passes when nothing is ready, and by small random steps. Work for threads runs in fibres.
"""

from __future__ import annotations

import asyncio
import hashlib
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

from tests.torture.fibres import Fibre, give_way

_T = TypeVar("_T")

_MOST_STEPS = 400_000
_DEFAULT_THREADS = 6


class Hung(AssertionError):
    """Nothing can happen any more, or too much has, and the scenario has not ended."""


@dataclass
class _Job:
    future: asyncio.Future[Any]
    work: Callable[[], Any]


@dataclass
class _Slots:
    """The threads of an executor: `most` jobs run at once."""

    most: int
    running: int = 0
    waiting: deque[_Job] = field(default_factory=deque)


class SeededLoop(asyncio.SelectorEventLoop):
    """`random`: decides everything. `fibres`: the threads that have not ended. `failures`: what nobody has handled.

    `stall`: how often the machine is busy with something else for a while.
    """

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self._now = 1000.0  # as on a machine that has run for a while
        self.fibres: list[Fibre] = []
        self.failures: list[BaseException | str] = []
        self.steps = 0
        self.preemption = self.random.choice([0.0, 0.1, 0.3])
        self._fifo = self.random.choice([0.0, 0.0, 0.5, 0.9])  # how often the oldest callback is picked
        self.stall = self.random.choice([0.0, 0.0, 0.01])
        self._favour: object = None
        self._executors: dict[Executor | None, _Slots] = {}
        self._order = hashlib.blake2b(digest_size=8)
        super().__init__()
        self.set_exception_handler(self._on_error)

    @property
    def order(self) -> str:
        """A digest of all choices so far: equal for equal seeds."""
        return self._order.hexdigest()

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return probability > 0 and self.random.random() < probability

    def time(self) -> float:
        return self._now

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., _T], *args: Any
    ) -> asyncio.Future[_T]:
        if isinstance(executor, ThreadPoolExecutor) and executor._shutdown:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future: asyncio.Future[_T] = self.create_future()
        self.slots(executor).waiting.append(_Job(future, lambda: func(*args)))
        self._start_jobs(executor)
        return future

    def slots(self, executor: Executor | None) -> _Slots:
        """What runs and waits in an executor."""
        if executor not in self._executors:
            most = executor._max_workers if isinstance(executor, ThreadPoolExecutor) else _DEFAULT_THREADS
            self._executors[executor] = _Slots(most)
        return self._executors[executor]

    def forget_jobs(self, executor: Executor) -> None:
        """Cancel what waits for a thread of `executor`."""
        waiting = self.slots(executor).waiting
        while waiting:
            waiting.popleft().future.cancel()

    def busy_threads(self) -> int:
        """How many jobs run or wait in all executors."""
        return sum(slots.running + len(slots.waiting) for slots in self._executors.values())

    def _start_jobs(self, executor: Executor | None) -> None:
        slots = self.slots(executor)
        while slots.waiting and slots.running < slots.most:
            job = slots.waiting.popleft()
            if not job.future.cancelled():
                slots.running += 1
                Fibre(self, lambda job=job: self._do(executor, job), "job")  # type: ignore[misc]

    def _do(self, executor: Executor | None, job: _Job) -> None:
        """Run a job, in a fibre."""
        while self.chance(0.3):
            give_way()
        try:
            result, error = job.work(), None
        except BaseException as raised:
            result, error = None, raised
        while self.chance(0.3):
            give_way()
        self.call_soon(self._done, executor, job.future, result, error)

    def _done(
        self, executor: Executor | None, future: asyncio.Future[Any], result: Any, error: BaseException | None
    ) -> None:
        self.slots(executor).running -= 1
        if not future.cancelled():
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
        self._start_jobs(executor)

    def _on_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.failures.append(context.get("exception") or f"{context['message']} {context.get('task', '')}")

    def _run_once(self) -> None:
        """One callback, in place of one pass."""
        for fibre in list(self.fibres):
            if fibre.can_go_on:
                fibre.resume()
        self._take_due()
        ready = self._ready  # type: ignore[attr-defined]
        if not ready:
            if not self._scheduled:  # type: ignore[attr-defined]
                raise Hung("nothing is ready, and nothing will be")
            self._now = max(self._now, self._scheduled[0]._when)  # type: ignore[attr-defined]
            self._take_due()
            return
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise Hung(f"no end after {self.steps} steps and {self._now:.0f} s")
        if self.chance(self.stall):
            self._now += self.random.expovariate(2.0)
        elif self.chance(0.2):
            self._now += self.random.expovariate(2000.0)
        handle = self._picked(ready)
        if not handle._cancelled:
            handle._run()

    def _take_due(self) -> None:
        scheduled = self._scheduled  # type: ignore[attr-defined]
        while scheduled and (scheduled[0]._cancelled or scheduled[0]._when <= self._now):
            timer = heapq.heappop(scheduled)
            timer._scheduled = False
            if timer._cancelled:
                self._timer_cancelled_count = max(0, self._timer_cancelled_count - 1)
            else:
                self._ready.append(timer)  # type: ignore[attr-defined]

    def _picked(self, ready: deque[asyncio.Handle]) -> asyncio.Handle:
        at = 0 if self.chance(self._fifo) else self.random.randrange(len(ready))
        of = _future_of(ready[at])
        if of is not None:
            at = next(index for index, handle in enumerate(ready) if _future_of(handle) is of)
        handle = ready[at]
        del ready[at]
        self._order.update(b"%d/%d " % (at, len(ready)))
        return handle


def _future_of(handle: asyncio.Handle) -> object:
    """The future whose callback it is, if any."""
    arguments: Any = handle._args  # type: ignore[attr-defined]
    first = arguments[0] if arguments else None
    return first if asyncio.isfuture(first) else None
