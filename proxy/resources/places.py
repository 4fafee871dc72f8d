"""Places for choices that are generated and committed, shared fairly by concurrent senders.

A single sender gets as many places as it needs. While other senders run choices, or have recently, a sender with more
than its share waits once three quarters of the places are taken, so that senders with less than their share never wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from itertools import islice
from typing import Any, NamedTuple

from proxy.resources.fair_queue import FairQueue
from proxy.resources.senders import Sender, Senders
from tokengrove.errors import brief

logger = logging.getLogger(__name__)

_LEAST = 8
"""The minimum share of a sender, unless it is more than half of all places: the choices of a usual group."""

_LATELY_S = 60.0
_MOST_REMEMBERED = 4096


class _Waiting(NamedTuple):
    sender: Sender
    place: asyncio.Future[None]


class Places:
    """The places of one process. Use it on one event loop.

    `most` returns the number of places while several senders share them.
    """

    def __init__(self, senders: Senders, most: Callable[[], int], clock: Callable[[], float] = time.monotonic) -> None:
        self._running, self._queued = senders.running, senders.queued
        self._most, self._clock = most, clock
        self._waiting: FairQueue[_Waiting] = FairQueue()
        self._seen: OrderedDict[Sender, float] = OrderedDict()
        self._hosts_seen: OrderedDict[str, float] = OrderedDict()
        self._told: OrderedDict[Sender, None] = OrderedDict()

    def take_now(self, sender: Sender) -> bool:
        """Take a place and return True, or return False if the sender must wait."""
        if self._waiting.hosts and sender in self._waiting:
            return False
        if self._running.total >= (most := self._most()) - most // 4 and not self._may(sender, most):
            return False
        self._running.add(sender, 1)
        return True

    async def take(self, sender: Sender) -> None:
        """Wait for a place, scheduled fairly by sender, and take it."""
        if self.take_now(sender):
            return
        waiting = _Waiting(sender, asyncio.get_running_loop().create_future())
        self._waiting.put(sender, waiting)
        self._queued.add(sender, 1)
        self._tell(sender)
        try:
            await waiting.place
        except asyncio.CancelledError:
            self._waiting.discard(sender, waiting)
            if waiting.place.done() and not waiting.place.cancelled():
                self.give_back(sender)
            else:
                self._let_in()  # a place may be free that this choice kept from the choices behind it
            raise
        finally:
            self._queued.add(sender, -1)

    def give_back(self, sender: Sender) -> None:
        """Give a place back, to the next choice that waits."""
        self._running.add(sender, -1)
        self._seen[sender] = self._hosts_seen[sender.host] = self._clock()
        self._seen.move_to_end(sender)
        self._hosts_seen.move_to_end(sender.host)
        if len(self._seen) > _MOST_REMEMBERED:
            self._seen.popitem(last=False)
        if len(self._hosts_seen) > _MOST_REMEMBERED:
            self._hosts_seen.popitem(last=False)
        if self._waiting.hosts:
            self._let_in()

    def _let_in(self) -> None:
        while self._waiting.hosts and self._waiting.take(self._start, look=1) is not None:
            pass

    def _start(self, waiting: _Waiting) -> bool:
        if waiting.place.cancelled():  # its task has not run since the cancellation
            return False
        most = self._most()
        if self._running.total >= most - most // 4 and not self._may(waiting.sender, most):
            return False
        self._running.add(waiting.sender, 1)
        waiting.place.set_result(None)
        return True

    def _may(self, sender: Sender, most: int) -> bool:
        """True if a sender may have one more place although most places are taken."""
        since = self._clock() - _LATELY_S
        return _is_within(self._running.of_host, sender.host, most, self._hosts_seen, since) and _is_within(
            self._running.of, sender, most, self._seen, since
        )

    def _tell(self, sender: Sender) -> None:
        """Log once per sender that it waits."""
        if sender in self._told:
            return
        self._told[sender] = None
        if len(self._told) > _MOST_REMEMBERED:
            self._told.popitem(last=False)
        logger.warning(
            "session %s at %s has %d choices running, and further ones wait, since others are here too: %d places are "
            "shared (--shared-running-requests). This is logged once for each session",
            brief(sender.name),
            sender.host,
            self._running.of.get(sender, 0),
            self._most(),
        )


def _is_within(
    running: Mapping[Any, int], who: Hashable, most: int, seen: OrderedDict[Any, float], since: float
) -> bool:
    """True if `who` has less than an equal share, or if no other has run anything since `since`."""
    mine, others = running.get(who, 0), len(running) - (who in running)
    if not others:
        others = any(other != who and seen[other] >= since for other in islice(reversed(seen), 2))
    return not others or mine < max(min(_LEAST, most // 2), most // (others + 1))
