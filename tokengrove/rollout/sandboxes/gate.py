"""Limits how many sandboxes exist at once. Who waits is let in in order, on any event loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque


class Gate:
    """Counts the sandboxes of one provider in this process. It is used from several event loops."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, most: int) -> None:
        """Wait until fewer than `most` are inside and all who came earlier have entered."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            self._waiting.append((most, turn))
            self._admit()
        try:
            await turn
        except asyncio.CancelledError:
            with self._lock:
                if (most, turn) in self._waiting:
                    self._waiting.remove((most, turn))
                else:
                    self._inside -= 1  # let in, but never started
                self._admit()
            raise

    def leave(self) -> None:
        """Make room for the next."""
        with self._lock:
            self._inside -= 1
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._inside < self._waiting[0][0]:
            _, turn = self._waiting.popleft()
            try:
                turn.get_loop().call_soon_threadsafe(_set, turn)
            except RuntimeError:
                continue  # its event loop is closed
            self._inside += 1


def _set(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
