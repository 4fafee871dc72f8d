"""The queue that TRL's trainer drains in its thread, and that an event loop fills in another."""

from __future__ import annotations

import asyncio
import queue
import time
from contextlib import suppress
from typing import Any


class Buffer(queue.Queue[Any]):
    """A `queue.Queue`, whose room can be awaited by one event loop. Nothing is on it twice, and its order is kept."""

    def __init__(self, maxsize: int) -> None:
        super().__init__(maxsize)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._room = asyncio.Event()

    async def put_when_free(self, row: Any) -> float:
        """Put a row as soon as there is room; return for how many seconds there was none."""
        self._loop, began = asyncio.get_running_loop(), time.monotonic()
        while True:
            self._room.clear()
            with suppress(queue.Full):
                row.enqueued_at = time.time()
                self.put_nowait(row)
                return time.monotonic() - began
            await self._room.wait()

    def _get(self) -> Any:
        """What `queue.Queue` calls, with its lock held, for each row that is taken off."""
        row = super()._get()
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits for room
                self._loop.call_soon_threadsafe(self._room.set)
        return row
