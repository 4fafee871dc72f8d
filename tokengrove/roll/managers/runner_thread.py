"""The thread of one runner: environments may depend on the thread that created them, and a runner may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class RunnerThread:
    """Calls functions one after another in its own daemon thread."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` after the earlier calls; the future has its result or exception."""
        future: Future[T] = Future()

        def call() -> None:
            try:
                result = function()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(call)
        return future

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` and wait; return its result or raise its exception."""
        return self.submit(function).result()

    def close(self) -> None:
        """End the thread after the earlier calls. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
