"""Which sessions changed lately, for whoever watches them live. Of changes nobody asks for nothing is kept.

A reader asks again and again from where he stopped. What is remembered is bounded; a reader who missed some is told so.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

MOST = 2000
"""Sessions that are remembered."""
REST_S = 10.0
"""Seconds without a reader after which nothing is remembered any more."""

Place = tuple[str, int]
"""Where a reader stopped: the name of the memory and its count of changes."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Ids of sessions that changed. `place`: where to go on. `all`: some may be missing, so look at all sessions."""

    place: Place
    ids: tuple[str, ...]
    all: bool


class ChangedSessions:
    """What changed through this process. Use it on the event loop only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name = uuid.uuid4().hex
        self._count = self._forgotten = 0
        self._asked_at: float | None = None
        self._by_id: dict[str, int] = {}

    def note(self, session_id: str) -> None:
        """Note that a session has changed, once it can be read."""
        if self._asked_at is None:
            return
        if self._clock() - self._asked_at > REST_S:
            self._rest()
            return
        self._count += 1
        self._by_id.pop(session_id, None)
        self._by_id[session_id] = self._count
        if len(self._by_id) > MOST:
            self._forgotten = self._by_id.pop(next(iter(self._by_id)))

    def since(self, place: Place | None) -> Changed:
        """What changed since `place`; with None nothing, and the place to begin at."""
        now = self._clock()
        if self._asked_at is None or now - self._asked_at > REST_S:
            self._rest()
        self._asked_at = now
        here = self._name, self._count
        if place is None:
            return Changed(here, (), all=False)
        if place[0] != self._name or place[1] < self._forgotten:
            return Changed(here, (), all=True)
        found = []
        for session_id, count in reversed(self._by_id.items()):
            if count <= place[1]:
                break
            found.append(session_id)
        return Changed(here, tuple(found[::-1]), all=False)

    def _rest(self) -> None:
        """Forget all: a reader who comes back learns that he missed some."""
        self._asked_at = None
        self._by_id.clear()
        self._count += 1
        self._forgotten = self._count
