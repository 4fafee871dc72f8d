"""Lets turns and choices begin a few at a time: those that come together must not hold up the streams that run.

Those that wait begin in turn by sender, so who sends many at once waits for itself.
"""

from __future__ import annotations

import asyncio

from proxy.resources.fair_queue import FairQueue
from proxy.resources.senders import Sender

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
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def enter(self, sender: Sender) -> None:
        """Return at once, or in a later pass of the event loop if `_AT_ONCE` turns have entered lately."""
        loop, lately = asyncio.get_running_loop(), self._before + self._entered
        if not lately:
            loop.call_soon(self._next_pass)
        if lately < _AT_ONCE:
            self._entered += 1
            return
        place: asyncio.Future[None] = loop.create_future()
        self._waiting.put(sender, place)
        await place

    def _next_pass(self) -> None:
        """Wake as many as may begin in the next pass."""
        self.passes += 1
        self._before, self._entered = self._entered, 0
        while self._waiting and self._entered < _AT_ONCE:
            place = self._waiting.take(_any)
            if place is not None and not place.done():  # else its request was cancelled
                place.set_result(None)
                self._entered += 1
        if self._before or self._entered:
            asyncio.get_running_loop().call_soon(self._next_pass)


def _any(_: object) -> bool:
    return True
