"""Worker threads for long work, shared fairly: waiting senders take turns.

Only one piece of large work runs at a time, so that smaller work of any sender does not wait for it, and memory stays
bounded.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

from proxy.resources.fair_queue import FairQueue
from proxy.resources.memory import FreedMemory
from proxy.resources.senders import Sender, Tally

_T = TypeVar("_T")

LARGE = 1_000_000
"""Work of this size, in characters, takes up to seconds, and much memory."""


class _Work(NamedTuple):
    """A function that waits for its turn. `place` is done when it may start."""

    sender: Sender
    size: int
    place: asyncio.Future[None]


class FairPool:
    """A pool of at least two `threads`, of which large work uses at most one. Use it on one event loop.

    `work`: the tally of the work of each sender.
    """

    def __init__(self, threads: int, freed: FreedMemory, work: Tally | None = None) -> None:
        self._threads, self._freed = max(threads, 2), freed
        self._work = Tally() if work is None else work
        self._executor = ThreadPoolExecutor(self._threads, thread_name_prefix="tokengrove-work")
        self._running = 0
        self._large = False  # whether large work runs
        self._waiting: FairQueue[_Work] = FairQueue()

    @property
    def waiting(self) -> int:
        """The number of pieces of work that wait for a thread."""
        return sum(1 for _ in self._waiting)

    async def run(self, sender: Sender, size: int, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call `function` in a thread, scheduled fairly by sender, and return its result.

        If the caller is cancelled while the function runs, the thread stays occupied until the function returns.
        """
        work = _Work(sender, size, asyncio.get_running_loop().create_future())
        self._work.add(sender, 1)
        if not self._start(work):
            self._waiting.put(sender, work)
        try:
            await work.place
        except asyncio.CancelledError:
            self._waiting.discard(sender, work)
            if work.place.done() and not work.place.cancelled():
                self._end(work)
            else:
                self._work.add(sender, -1)
            raise
        # No local variable refers to the future: its error would form a cycle with this frame and the arguments.
        return await asyncio.shield(self._begin(work, function, *arguments))

    def close(self) -> None:
        """Start no more work. Running work continues to its end."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _start(self, work: _Work) -> bool:
        if self._running == self._threads or (work.size >= LARGE and self._large):
            return False
        if work.place.cancelled():  # its caller has not run since the cancellation
            return False
        self._running += 1
        self._large |= work.size >= LARGE
        work.place.set_result(None)
        return True

    def _begin(self, work: _Work, function: Callable[..., _T], *arguments: Any) -> asyncio.Future[_T]:
        begun = asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)
        begun.add_done_callback(lambda _: self._end(work))
        return begun

    def _end(self, work: _Work) -> None:
        self._running -= 1
        self._work.add(work.sender, -1)
        if work.size >= LARGE:
            self._large = False
        self._freed.expect()
        while self._waiting.take(self._start) is not None:
            pass
