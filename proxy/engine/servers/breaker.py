"""Circuit breaker of an engine server: it opens when the server keeps failing requests that others answer.

A failure counts only once another server has answered the same request, so a request that fails everywhere opens no
breaker. An open one waits for a probe (`proxy.engine.servers.proof`), longer after each that fails. A server that
passed one is on trial: its next failure opens the breaker again, and the wait grows on, until requests have succeeded.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_LIMIT = 3.0
"""The score that opens the breaker. A failure adds 1 to it."""

_FORGIVEN = 0.25
"""What a request that succeeds takes off the score: a server that fails more than a fifth of its requests opens it."""

_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 30.0
_JITTER = 0.25
"""The part of a wait that is random, so that several processes do not probe a server together."""


class Breaker:
    """The failures of one server. `open`: the server gets no requests while another one can take them.

    `clock` gives seconds, `chance` random numbers from 0 up to 1.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, chance: Callable[[], float] = random.random
    ) -> None:
        self.open = False
        self._clock, self._chance = clock, chance
        self._score, self._waits = 0.0, 0
        self._due = self._sound = -1.0

    def blame(self, failed_at: float, *, alone: bool) -> bool:
        """Count a failure; return True if it opens the breaker. One from before the latest passed probe is void.

        `alone`: no other server takes requests, so this one must go on.
        """
        if self.open or failed_at <= self._sound:
            return False
        self._score = min(self._score + 1.0, _LIMIT)
        if self._score < _LIMIT or alone:
            return False
        self.open = True
        self.postpone()
        return True

    def credit(self) -> None:
        """Count a request that succeeded."""
        if self._score:
            self._score = max(self._score - _FORGIVEN, 0.0)
            if not self._score:
                self._waits = 0

    @property
    def due(self) -> bool:
        """True if the next probe may start."""
        return self._clock() >= self._due

    def postpone(self) -> None:
        """Wait before the next probe: the breaker has just opened, or a probe has failed."""
        longest = min(_FIRST_WAIT_S * 2.0 ** min(self._waits, 16), _LONGEST_WAIT_S)
        self._due = self._clock() + longest * (1.0 - _JITTER * self._chance())
        self._waits += 1

    def close(self) -> None:
        """Note that the server has sampled a token: the breaker is closed, on trial if it was open."""
        self._due = self._sound = self._clock()
        if self.open:
            self.open, self._score = False, _LIMIT - 1.0
