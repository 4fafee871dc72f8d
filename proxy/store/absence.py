"""While the database is away, calls wait for it: its connections are lost, or it starts, recovers or shuts down.

The wait ends when the database takes a transaction again, `wait_s` seconds after it went away, or when the server
stops. What fails for another reason (a full disk, a bad value, a lock, a read-only database) never waits. How many
calls wait, and with how many bytes, is bounded; what comes beyond that is refused at once.
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
    """How many seconds calls wait for a database that is away (0: not at all), and how many with how many bytes."""

    wait_s: float = 0.0
    most_waiting: int = 8192
    most_bytes: int = 256 * 1024 * 1024


class Absence:
    """Whether the database is away, and whether calls still wait for it. May be used in any thread.

    `since`: when it went away, in seconds of `clock`; None while it is there, as far as it is known, or if nothing ever
    waits. `waiting`: returns how many calls wait, for the log.
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
        """Nothing waits any more: the server stops, or the database has been away for too long."""
        since = self.since
        return self._stopping.is_set() or (since is not None and self._clock() >= since + self.patience.wait_s)

    @property
    def is_waited_for(self) -> bool:
        """The database is away, and calls wait for it."""
        return self.since is not None and not self.given_up

    def begin(self, fault: str, reason: str) -> None:
        """Note that the database is away. `fault`: what is wrong, in our words; `reason`: in those of the driver."""
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
        """Note that the database has answered. `since`: of this absence when it was asked; an older answer says
        nothing."""
        if since is not None and since == self.since:
            self.since = None
            after_s = round(self._clock() - since, 1)
            logger.warning("the database is back", {"after_s": after_s, "waited": self._waiting()})

    def stop(self) -> None:
        """The server stops: nothing waits any more, now and later."""
        self._stopping.set()

    def pause(self, tries: int) -> None:
        """Block between two tries, at most until the server stops. `tries`: how many there were."""
        self._stopping.wait(pause_s(tries))

    def check_room(self, waiting: int, held_bytes: int) -> None:
        """Raise StoreUnavailable if so much waits that no more may."""
        if waiting >= self.patience.most_waiting or held_bytes >= self.patience.most_bytes:
            raise StoreUnavailable(f"the database is away ({self.fault}), and too many calls wait for it; try again")


def pause_s(tries: int) -> float:
    """Seconds until the next try, after so many."""
    return min(_FIRST_PAUSE_S * 2.0 ** min(tries, 8), _LONGEST_PAUSE_S)
