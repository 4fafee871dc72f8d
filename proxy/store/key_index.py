"""Sessions by the hash of a key."""

from __future__ import annotations

from proxy.store.known_sessions import KnownSessions
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import reads
from proxy.store.sql.reads import KeyHolder
from proxy.types import SessionRecord


class KeyIndex:
    """Looks up session records for key checks."""

    def __init__(self, database: OpenDatabase, known: KnownSessions) -> None:
        self._database, self._known = database, known

    @property
    def shared(self) -> bool:
        """True if other replicas may issue, move or withdraw keys."""
        return self._database.shared

    async def find_key(self, key_hash: str) -> KeyHolder:
        """The newest live session with this agent key, else the newest ended one; else the same for control keys."""
        return await self._database.read(reads.find_key, key_hash)

    async def is_withdrawn(self, key_hash: str) -> bool:
        """Whether this was a key or path secret of a session before its keys were rotated or it was deleted."""
        return await self._database.read(reads.is_withdrawn, key_hash)

    async def load_session(self, session_id: str) -> SessionRecord | None:
        """The record of a session, which has the hash of its path key; None if there is no such session."""
        if self._known.exclude(session_id) and self._database.running:
            return None
        return await self._database.read(reads.load_session, session_id)
