"""Logs that the database refuses reads or commits: at the beginning, every ten seconds, and at the end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_EVERY_S = 10.0


class Outage:
    """The refusals of one kind, `reads` or `commits`. May be used in any thread; a count may then miss one.

    `going_on`: the database refused the latest read or commit, as far as is known.
    """

    def __init__(self, what: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._clock = what, clock
        self.going_on = False
        self._since = self._told_at = 0.0
        self._refused = 0

    def refused(self, fault: str, reason: str) -> None:
        """Note a refusal. `fault`: the fault in our words; `reason`: the driver's message."""
        now = self._clock()
        self._refused += 1
        if self.going_on and now - self._told_at < _EVERY_S:
            return
        if not self.going_on:
            self.going_on, self._since, self._refused = True, now, 1
        self._told_at = now
        refused_s = round(now - self._since, 1)
        fields = {"fault": fault, "reason": reason, "refused": self._refused, "for_s": refused_s or None}
        logger.error(f"the database refuses {self._what}", fields)

    def over(self) -> None:
        """Note that the database accepts reads or commits again."""
        if self.going_on:
            self.going_on = False
            fields = {"refused": self._refused, "after_s": round(self._clock() - self._since, 1)}
            logger.warning(f"the database takes {self._what} again", fields)
