"""Lets turns begin a few at a time: those that arrive together must not hold up the streams that run."""

from __future__ import annotations

import asyncio
from collections import deque

_AT_ONCE = 8
"""Turns that may begin in one pass of the event loop. Each takes about a third of a millisecond there."""


class Turnstile:
    """One for all turns of an event loop. Between its passes, the loop reads and writes for everybody else."""

    def __init__(self) -> None:
        self._entered = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return at once, or in a later pass of the event loop if `_AT_ONCE` turns have entered in this one.

        Those that wait enter in order of arrival. One that arrives as the last of them enter may enter with them.
        """
        loop = asyncio.get_running_loop()
        if not self._entered:
            loop.call_soon(self._next_pass)
        if self._entered < _AT_ONCE:
            self._entered += 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_pass(self) -> None:
        self._entered = 0
        while self._waiting and self._entered < _AT_ONCE:
            place = self._waiting.popleft()
            if not place.done():  # else its request was cancelled
                place.set_result(None)
                self._entered += 1
        if self._entered:
            asyncio.get_running_loop().call_soon(self._next_pass)
