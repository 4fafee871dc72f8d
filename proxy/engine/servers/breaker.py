"""The circuit breaker of an engine server. It opens when the server keeps failing requests that other servers answer.

A failure counts only once another server has answered the same request, so a request that fails everywhere opens no
breaker. An open breaker waits for a probe (`proxy.engine.servers.proof`), longer after each failed probe. A server that
passed a probe is on trial: until requests have succeeded, its next failure reopens the breaker, and the wait continues
to grow.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_LIMIT = 3.0
"""The score that opens the breaker. Each failure adds 1 to the score."""

_FORGIVEN = 0.25
"""The amount by which a successful request lowers the score: a failure rate above one fifth opens the breaker."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_JITTER = 0.25
"""The random fraction of a wait, so that several processes do not probe a server at the same time."""


class Breaker:
    """The failures of one server. `open`: the server gets no requests while another server takes them.

    `clock` returns seconds; `chance` returns random numbers from 0 up to 1.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self.open = False
        self._clock, self._chance = clock, chance
        self.score, self._waits = 0.0, 0
        self._due = self._sound = -1.0

    def blame(self, failed_at: float, *, alone: bool) -> bool:
        """Count a failure; return True if it opens the breaker. Failures before the latest passed probe are ignored.

        `alone`: no other server takes requests, so this one must continue.
        """
        if self.open or failed_at <= self._sound:
            return False
        self.score = min(self.score + 1.0, _LIMIT)
        if self.score < _LIMIT or alone:
            return False
        self.open = True
        self.postpone()
        return True

    def credit(self) -> None:
        """Count a successful request."""
        if self.score:
            self.score = max(self.score - _FORGIVEN, 0.0)
            if not self.score:
                self._waits = 0

    @property
    def due(self) -> bool:
        """True if the next probe may start."""
        return self._clock() >= self._due

    def postpone(self) -> None:
        """Postpone the next probe, after the breaker has opened or a probe has failed."""
        longest = min(_FIRST_WAIT_S * 2.0 ** min(self._waits, 16), _LONGEST_WAIT_S)
        self._due = self._clock() + longest * (1.0 - _JITTER * self._chance())
        self._waits += 1

    def close(self) -> None:
        """Close the breaker, since the server has sampled a token. If it was open, the server is on trial."""
        self._due = self._sound = self._clock()
        if self.open:
            self.open, self.score = False, _LIMIT - 1.0
