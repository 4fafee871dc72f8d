"""Lets turns and choices begin a few at a time, so that a burst of them does not delay running streams.

Waiting turns are scheduled fairly by sender, so a sender of many turns delays only itself.
"""

from __future__ import annotations

import asyncio

from proxy.resources.fair_queue import FairQueue
from proxy.resources.senders import Sender

_AT_ONCE = 8
"""The number of turns that may begin in one pass of the event loop. Each takes about a third of a millisecond."""


class Turnstile:
    """The turnstile for all turns of an event loop. Between its passes, the loop does all other work.

    `passes` is incremented with each pass after a turn entered. If it is unchanged, the turn has not waited since.

    `_entered` counts the turns since the last call of `_next_pass`, and `_before` the turns between the two last calls.
    A pass of the loop includes a part of each, so their sum must stay within the limit.
    """

    def __init__(self) -> None:
        self._entered = self._before = self.passes = 0
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()

    async def enter(self, sender: Sender) -> None:
        """Return immediately, or in a later pass of the event loop if `_AT_ONCE` turns have entered recently."""
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
        """Wake as many turns as may begin in the next pass."""
        self.passes += 1
        self._before, self._entered = self._entered, 0
        while self._waiting.hosts and self._entered < _AT_ONCE:
            place = self._waiting.take(_any)
            if place is not None and not place.done():  # else its request was cancelled
                place.set_result(None)
                self._entered += 1
        if self._before or self._entered:
            asyncio.get_running_loop().call_soon(self._next_pass)


def _any(_: object) -> bool:
    return True
