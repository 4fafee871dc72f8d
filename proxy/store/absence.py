"""Calls wait while the database is unavailable: its connections are lost, or it starts, recovers or shuts down.

The wait ends when the database accepts a transaction again, `wait_s` seconds after it became unavailable, or when the
server stops. Calls that fail for another reason (a full disk, a bad value, a lock, a read-only database) never wait.
The number and the bytes of waiting calls are bounded; further calls are refused at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from tokengrove.errors import StoreUnavailable

logger = logging.getLogger(__name__)

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5
_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Patience:
    """The seconds that calls wait for an unavailable database (0: they do not wait), and the most calls and bytes."""

    wait_s: float = 0.0
    most_waiting: int = 8192
    most_bytes: int = 256 * 1024 * 1024


class Absence:
    """Whether the database is unavailable, and whether calls still wait for it. May be used in any thread.

    `since`: when it became unavailable, in seconds of `clock`; None while it is available, as far as is known, or if
    calls never wait. `waiting`: returns the number of waiting calls, for the log.
    """

    def __init__(
        self, patience: Patience, waiting: Callable[[], int], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.patience, self._waiting, self._clock = patience, waiting, clock
        self.since: float | None = None
        self.fault = ""
        self._told_at = 0.0
        self._stopping = threading.Event()

    @property
    def given_up(self) -> bool:
        """Calls no longer wait: the server stops, or the database has been unavailable for too long."""
        since = self.since
        return self._stopping.is_set() or (since is not None and self._clock() >= since + self.patience.wait_s)

    @property
    def is_waited_for(self) -> bool:
        """The database is unavailable, and calls wait for it."""
        return self.since is not None and not self.given_up

    def begin(self, fault: str, reason: str) -> None:
        """Note that the database is unavailable. `fault`: the fault in our words; `reason`: the driver's message."""
        if self.patience.wait_s <= 0 or self._stopping.is_set():
            return
        now = self._clock()
        if self.since is None:
            self.since, self.fault, self._told_at = now, fault, now
            logger.warning(
                "the database is away, calls wait for it",
                {"fault": fault, "reason": reason, "wait_s": self.patience.wait_s},
            )
        elif now - self._told_at >= _EVERY_S and not self.given_up:
            self._told_at = now
            for_s = round(now - self.since, 1)
            logger.warning("the database is still away", {"fault": fault, "for_s": for_s, "waiting": self._waiting()})

    def over(self, since: float | None) -> None:
        """Note that the database has answered. `since`: its value when the query began; older answers are ignored."""
        if since is not None and since == self.since:
            self.since = None
            after_s = round(self._clock() - since, 1)
            logger.warning("the database is back", {"after_s": after_s, "waited": self._waiting()})

    def stop(self) -> None:
        """End all waiting, now and later, because the server stops."""
        self._stopping.set()

    def pause(self, tries: int) -> None:
        """Block between two tries, at most until the server stops. `tries`: the number of tries so far."""
        self._stopping.wait(pause_s(tries))

    def check_room(self, waiting: int, held_bytes: int) -> None:
        """Raise StoreUnavailable if the limit of waiting calls or bytes is reached."""
        if waiting >= self.patience.most_waiting or held_bytes >= self.patience.most_bytes:
            raise StoreUnavailable(f"the database is away ({self.fault}), and too many calls wait for it; try again")


def pause_s(tries: int) -> float:
    """Seconds until the next try, after `tries` tries."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(tries, 8), _LONGEST_PAUSE_S)
