"""An event loop in its own thread, for trainers with blocking calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Running(Generic[T]):
    """A coroutine on the loop of another thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, steps: Coroutine[Any, Any, T]) -> None:
        self._loop, self._outcome = loop, Future[T]()
        self._task: asyncio.Task[T] | None = None
        loop.call_soon_threadsafe(self._begin, steps)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._outcome.done()

    def result(self, timeout_s: float | None = None) -> T:
        """Its result. Raises its exception, CancelledError (of concurrent.futures) after `end`, and TimeoutError if it
        runs for longer than `timeout_s` from now."""
        return self._outcome.result(timeout_s)

    def failure(self) -> BaseException | None:
        """Its exception, or None."""
        return self._outcome.exception() if self.done() else None

    def end(self) -> None:
        """Cancel it, if it is running, and wait until it has ended."""
        if not self.done():
            with suppress(RuntimeError):  # the loop is closed, so it has ended
                self._loop.call_soon_threadsafe(self._cancel)
            wait([self._outcome])

    def _begin(self, steps: Coroutine[Any, Any, T]) -> None:
        self._task = self._loop.create_task(steps)
        self._task.add_done_callback(self._ended)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if task.cancelled():
            self._outcome.set_exception(CancelledError())
        elif (failure := task.exception()) is not None:
            self._outcome.set_exception(failure)
        else:
            self._outcome.set_result(task.result())


class LoopThread:
    """Starts with the first coroutine. The thread is a daemon, so that a trainer can fail and exit without `close`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self.closed = False

    def submit(self, steps: Coroutine[Any, Any, T]) -> Running[T]:
        """Run a coroutine. Raises RuntimeError after `close`."""
        with self._lock:
            if self.closed:
                steps.close()
                raise RuntimeError(f"{self._name} is closed")
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=_run, args=(self._loop,), name=self._name, daemon=True)
                self._thread.start()
            return Running(self._loop, steps)

    def answers(self, within_s: float) -> bool:
        """Whether the loop runs a step within `within_s` seconds. Raises RuntimeError after `close`."""
        with suppress(TimeoutError):
            self.submit(asyncio.sleep(0)).result(within_s)
            return True
        return False

    def close(self) -> None:
        """Cancel all running coroutines, and wait for the end of the thread. May be called again."""
        with self._lock:
            self.closed = True
            if self._loop is not None and self._thread is not None and self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._thread.join()


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
