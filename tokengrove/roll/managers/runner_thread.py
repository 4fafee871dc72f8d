"""The thread of one runner: environments may belong to the thread that made them, and a runner that hangs is left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class RunnerThread:
    """Calls functions one after another in a thread of its own, which does not keep the program from ending."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Call `function` once the calls before it have ended; the future has what it returns or raises."""
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
        """Call `function` and wait; return or raise what it does."""
        return self.submit(function).result()

    def close(self) -> None:
        """End the thread once the calls before have ended, if ever they do. It waits for nothing."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
