"""The sessions that changed recently, for clients that watch them live. Without readers, nothing is kept.

A reader polls from the place where it stopped. The memory is bounded; the answer tells a reader if it missed changes.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

MOST = 2000
"""The most sessions that are remembered."""
REST_S = 10.0
"""Seconds without a reader after which the memory is cleared."""

Place = tuple[str, int]
"""Where a reader stopped: the name of the memory and its count of changes."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Ids of sessions that changed. `place`: where to continue. `all`: ids may be missing, so read all sessions."""

    place: Place
    ids: tuple[str, ...]
    all: bool


class ChangedSessions:
    """The changes made through this process. Use it on the event loop only.

    `watched`: a client may read them; `note` does nothing otherwise.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._name = uuid.uuid4().hex
        self._count = self._forgotten = 0
        self._asked_at: float | None = None
        self.watched = False
        self._by_id: dict[str, int] = {}

    def note(self, session_id: str) -> None:
        """Note that a session has changed. Call it when the change can be read."""
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
        """The changes since `place`; with None no changes, and the place to begin at."""
        now = self._clock()
        if self._asked_at is None or now - self._asked_at > REST_S:
            self._rest()
        self._asked_at, self.watched = now, True
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
        """Clear the memory. A reader that returns learns that it missed changes."""
        self._asked_at, self.watched = None, False
        self._by_id.clear()
        self._count += 1
        self._forgotten = self._count
