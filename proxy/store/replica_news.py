"""Reads that keep a live session up to date: changes by other replicas, and calls that have begun."""

from __future__ import annotations

from collections.abc import Collection

from proxy.store.known_sessions import KnownSessions
from proxy.store.news import InArchive, News, Seen
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import images, reads, revisions
from proxy.types import ImagePart


class ReplicaNews:
    """Reads of the state that other replicas, or this process before a restart, have stored in the database."""

    def __init__(self, database: OpenDatabase, known: KnownSessions) -> None:
        self._database, self._known = database, known

    @property
    def shared(self) -> bool:
        """True if other replicas may write to the database."""
        return self._database.shared

    def excludes(self, session_id: str) -> bool:
        """Return True if a session certainly does not exist. Does not read the database."""
        return self._known.exclude(session_id) and self._database.write.running

    async def load_news(self, session_id: str, seen: Seen) -> News | InArchive | None:
        """The changes of a session since it was `seen`, or where it is archived; None if there is none."""
        if self._database.shared:
            news = await self._database.new_turns(session_id, seen)
            if not isinstance(news, News) or news.seen.revision == seen.revision:
                return news
        elif self.excludes(session_id):
            return None
        return await self._database.read(revisions.load_news, session_id, seen)

    async def live_sessions(self, session_ids: Collection[str]) -> set[str]:
        """The sessions, of at most 10,000, that have not ended."""
        return await self._database.read(revisions.live_sessions, session_ids)

    async def load_begun(self, session_id: str) -> dict[str, float]:
        """Ids of the calls that have begun and not ended, each with its start in Unix seconds."""
        return await self._database.read(reads.load_begun, session_id)

    async def load_unreplied(self, session_id: str) -> set[str]:
        """Ids of the complete interactions whose reply was never completely written."""
        return await self._database.read(reads.load_unreplied, session_id)

    async def load_images(self, session_id: str) -> list[tuple[ImagePart, int, str | None]]:
        """Each image of a session: a part without a position, its number of bytes, and the URL it was fetched from."""
        return await self._database.read(images.load_parts, session_id)
