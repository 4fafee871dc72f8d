"""Session ids in memory, so that a request that names a new session costs no read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tokengrove.errors import StoreUnavailable

# About 100 bytes an id: 20 MB at most.
MAX_KNOWN = 200_000
_PAGE = 5000


class KnownSessions:
    """All session ids of a database that only this process writes to; unknown otherwise or above MAX_KNOWN.

    The ids are read page by page after the first lookup, so a server with many sessions starts as fast as with none.
    """

    def __init__(self, read: Callable[[str, int], Awaitable[list[str]]] | None) -> None:
        """`read(after, limit)`: the sorted ids that follow `after`; None if other processes also write."""
        self._read = read
        self._ids: set[str] | None = None if read is None else set()
        self._reading: asyncio.Task[None] | None = None
        self._complete = False

    def add(self, session_id: str) -> None:
        """Remember an id whose row is about to be queued."""
        if self._ids is not None:
            self._ids.add(session_id)
            if len(self._ids) > MAX_KNOWN:
                self._ids = None

    def exclude(self, session_id: str) -> bool:
        """Return True if the session certainly does not exist."""
        if self._ids is None:
            return False
        if not self._complete:
            if self._reading is None:
                self._reading = asyncio.create_task(self._read_all())
            return False
        return session_id not in self._ids

    async def _read_all(self) -> None:
        assert self._read is not None
        after = ""
        try:
            while page := await self._read(after, _PAGE):
                for after in page:
                    self.add(after)
                if self._ids is None:
                    return
        except StoreUnavailable:
            self._reading = None  # the next lookup starts again
            return
        self._complete = True
