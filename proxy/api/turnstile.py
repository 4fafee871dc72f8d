"""Lets turns begin a few at a time: those that arrive together must not hold up the streams that run."""

from __future__ import annotations

import asyncio
from collections import deque

_AT_ONCE = 8
"""Turns that may begin in one pass of the event loop. Each takes about a third of a millisecond there."""


class Turnstile:
    """One for all turns of an event loop. Between its passes, the loop reads and writes for everybody else.

    `passes` grows with each pass after a turn entered: if it did not, that turn has not waited since.

    `_entered` counts from one call of `_next_pass` to the next, `_before` from the call before that to the last one. A
    pass of the loop has a part of each, so together they stay within the limit.
    """

    def __init__(self) -> None:
        self._entered = self._before = self.passes = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self) -> None:
        """Return at once, or in a later pass of the event loop if `_AT_ONCE` turns have entered lately.

        Those that wait enter in order of arrival.
        """
        loop, lately = asyncio.get_running_loop(), self._before + self._entered
        if not lately:
            loop.call_soon(self._next_pass)
        if lately < _AT_ONCE:
            self._entered += 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.append(place)
        await place

    def _next_pass(self) -> None:
        """Wake as many as may begin in the next pass."""
        self.passes += 1
        self._before, self._entered = self._entered, 0
        while self._waiting and self._entered < _AT_ONCE:
            place = self._waiting.popleft()
            if not place.done():  # else its request was cancelled
                place.set_result(None)
                self._entered += 1
        if self._before or self._entered:
            asyncio.get_running_loop().call_soon(self._next_pass)
