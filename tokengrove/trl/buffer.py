"""The queue of rows for TRL's trainer, which reads it in one thread while an event loop fills it in another."""

from __future__ import annotations

import asyncio
import queue
import time
from contextlib import suppress
from typing import Any


class Buffer(queue.Queue[Any]):
    """A `queue.Queue` whose free room one event loop can await. Rows are queued once and stay in order."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Event()

    async def put_when_free(self, row: Any) -> float:
        """Put a row as soon as there is room; return the seconds that it waited. Sets the row's `enqueued_at`."""
        self._loop, began = asyncio.get_running_loop(), time.monotonic()
        while True:
            self._room.clear()
            with suppress(queue.Full):
                row.enqueued_at = time.time()
                self.put_nowait(row)
                return time.monotonic() - began
            await self._room.wait()

    def _get(self) -> Any:
        """Called by `queue.Queue`, with its lock held, for each row that is taken."""
        row = super()._get()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for room
                self._loop.call_soon_threadsafe(self._room.set)
        return row
