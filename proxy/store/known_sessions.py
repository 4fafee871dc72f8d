"""Session ids in memory: a request that names a new session then costs no read."""

from __future__ import annotations

# About 100 bytes an id: 20 MB at most.
MAX_KNOWN = 200_000


class KnownSessions:
    """All session ids of a database that only this process writes to; unknown (None) otherwise or above MAX_KNOWN."""

    def __init__(self, ids: set[str] | None) -> None:
        self._ids = ids if ids is not None and len(ids) <= MAX_KNOWN else None

    def add(self, session_id: str) -> None:
        """Remember an id whose row is about to be queued."""
        if self._ids is not None:
            self._ids.add(session_id)
            if len(self._ids) > MAX_KNOWN:
                self._ids = None

    def exclude(self, session_id: str) -> bool:
        """Return True if the session certainly does not exist."""
        return self._ids is not None and session_id not in self._ids
