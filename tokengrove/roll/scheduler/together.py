"""Concurrent calls, each in its own thread. The first failure is raised at once."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping


class Together:
    """Calls by the names of their threads, which are daemons and do not keep a program from exiting."""

    def __init__(self, calls: Mapping[str, Callable[[], None]]) -> None:
        self._ended: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._call, args=[call], name=name, daemon=True) for name, call in calls.items()
        ]

    def run(self) -> None:
        """Start all calls and wait for them. The first exception is raised at once; the other calls continue."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if (error := self._ended.get()) is not None:
                raise error

    def join(self, timeout_s: float) -> list[str]:
        """Wait for the running calls; return the thread names of those that still run after `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        started = [thread for thread in self._threads if thread.ident is not None]
        for thread in started:
            thread.join(min(max(0.0, until - time.monotonic()), threading.TIMEOUT_MAX))
        return [thread.name for thread in started if thread.is_alive()]

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._ended.put(error)
        else:
            self._ended.put(None)
