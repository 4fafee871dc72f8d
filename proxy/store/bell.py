"""Wakes the waiters of one event loop when a session ends on this replica."""

from __future__ import annotations

import asyncio
import contextlib


class Bell:
    """A repeatable event. A waiter that calls `listen` before it reads the state misses no ring."""

    def __init__(self) -> None:
        self._next: asyncio.Event = asyncio.Event()

    def ring(self) -> None:
        """Wake all listeners; later listeners wait for the next ring."""
        rung, self._next = self._next, asyncio.Event()
        rung.set()

    def listen(self) -> asyncio.Event:
        """Return the event that the next ring sets."""
        return self._next


async def heard(ring: asyncio.Event, at_most_s: float) -> None:
    """Wait for a ring, at most `at_most_s` seconds."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await ring.wait()
