"""The sessions in memory. A session is loaded when it is used, and dropped when it is idle (`session_memory`).

Memory and store give the same tree. If replicas share the store, a session is refreshed at each lookup, and changes use
optimistic locking: the store refuses a change that is based on an older state; the caller then refreshes the session
and decides again.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from proxy.sessions.ids import is_session_id
from proxy.sessions.keys import Keyring
from proxy.sessions.live_session import LiveSession, deleted
from proxy.sessions.replica import NOTHING_SEEN, absorb
from proxy.store.news import InArchive, News, Seen
from proxy.store.replica_news import ReplicaNews
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.cache import InteractionCache
from tokengrove.errors import SessionArchived, SessionNotFound, brief

# Turns of a stored session that are merged before yielding to the event loop: they take about 10 ms.
_ABSORBED_AT_ONCE = 100


class Registry:
    """Live sessions by id. `shared`: True if other replicas may also change them."""

    def __init__(self, news: ReplicaNews, keys: Keyring, metrics: Metrics) -> None:
        self.shared = news.shared
        self._news, self._keys = news, keys
        self._live: dict[str, LiveSession] = {}
        metrics.sessions.in_memory.watch(self._live.__len__)
        self._forgotten: dict[str, weakref.ref[LiveSession]] = {}
        self._loading: dict[str, asyncio.Task[LiveSession | InArchive | None]] = {}

    async def get(self, session_id: str) -> LiveSession:
        """The session in its newest state, from memory or from the store. Raises SessionNotFound or SessionArchived."""
        session = self._live.get(session_id)
        if session is None and session_id in self._forgotten:
            session = self._recall(session_id)
        if session is not None:
            if not self.shared:
                return session
            try:
                await self.refresh(session)
                return session
            except SessionNotFound:  # deleted elsewhere; a new session may have its id
                pass
        if self.excludes(session_id):
            raise _not_found(session_id)
        earlier = self._loading.get(session_id) if self.shared else None
        if earlier is not None and isinstance(found := await asyncio.shield(earlier), LiveSession):
            await self.refresh(found)  # the load may have read the database before this request came
            return found
        task = self._loading.get(session_id)
        if task is None or task is earlier:
            task = self._begin_load(session_id)
        found = await asyncio.shield(task)
        if isinstance(found, InArchive):
            raise SessionArchived(session_id, found.file)
        if found is None:
            raise _not_found(session_id)
        return found

    def _begin_load(self, session_id: str) -> asyncio.Task[LiveSession | InArchive | None]:
        def forget(task: asyncio.Task[LiveSession | InArchive | None]) -> None:
            if self._loading.get(session_id) is task:  # another load may have begun
                del self._loading[session_id]

        task = self._loading[session_id] = asyncio.create_task(self._load(session_id))
        task.add_done_callback(forget)
        return task

    def excludes(self, session_id: str) -> bool:
        """Whether a session certainly exists neither in memory nor in the store. Does not read the database."""
        known = session_id in self._live or session_id in self._forgotten
        return not known and self._news.excludes(session_id)

    def find(self, session_id: str) -> LiveSession | None:
        """The session if it is in memory."""
        return self._live.get(session_id) or self._recall(session_id)

    def metadata_of(self, name: str) -> Mapping[str, Any] | None:
        """The metadata of a session in memory. `name`: its id, or the id followed by `~` and more, as in a path."""
        session = self._live.get(name) or self._live.get(name.rpartition("~")[0])
        return None if session is None else session.record.metadata

    def add(self, session: LiveSession) -> LiveSession:
        """Put a session in memory and return it. If memory already has a session with its id, return that session."""
        session = self._live.setdefault(session.id, session)
        return session

    def discard(self, session: LiveSession) -> None:
        """Drop a session from memory; the next request looks for it in the store again."""
        if self._live.get(session.id) is session:
            del self._live[session.id]

    async def refresh(self, session: LiveSession) -> None:
        """Read the changes of other replicas; without replicas, do nothing. Raises SessionNotFound."""
        if not self.shared:
            return
        confirmed = session.confirmed  # its row may be committed while this query misses it
        news = await self._news.load_news(session.id, session.seen)
        if confirmed and (not isinstance(news, News) or _is_other(session, news)):
            self.forget_deleted(session)
            raise deleted(session.id)
        if isinstance(news, News):
            if _is_other(session, news):  # another replica created the row first, so ours was refused
                assert news.record is not None
                session.record, session.seen = news.record, NOTHING_SEEN
            session.stored = session.confirmed = True
            known = len(session.images)
            absorb(session, news, elsewhere=True)
            if len(session.images) > known:
                await self._learn_images(session)

    def forget_deleted(self, session: LiveSession) -> None:
        """Drop a deleted session and its keys from memory."""
        session.deleted = True
        self.discard(session)
        self._keys.release(session.record)
        session.ended.set()  # nobody waits for the end of a deleted session

    def seen(self, session: LiveSession) -> Seen | None:
        """The state that a change is based on, for optimistic locking; None without other replicas."""
        return session.seen if self.shared else None

    async def count_begun(self, session_id: str) -> int:
        """The number of calls that have begun and not ended. Read it before the interactions to miss no call."""
        live = self._live.get(session_id)
        return max(len(await self.load_begun(session_id)), live.running if live is not None else 0)

    async def load_begun(self, session_id: str) -> dict[str, float]:
        """Ids of calls that have begun and not ended according to the database, each with its start in Unix seconds."""
        return await self._news.load_begun(session_id)

    def count_unconfirmed(self) -> int:
        """The number of sessions in memory whose rows are not in the store yet."""
        return sum(not session.confirmed for session in self._live.values())

    def sessions(self) -> list[LiveSession]:
        """The sessions in memory."""
        return list(self._live.values())

    def forget(self, session: LiveSession) -> None:
        """Drop a session from memory; the store keeps everything.

        While a request still holds the session, other requests get the same object. A second object of the session
        would lack the turns of the first.
        """
        self.discard(session)
        self._keys.release(session.record)
        self._forgotten[session.id] = weakref.ref(session)

    def forget_gone(self) -> None:
        """Drop the weak references to forgotten sessions that no request holds any more."""
        self._forgotten = {name: kept for name, kept in self._forgotten.items() if kept() is not None}

    def _recall(self, session_id: str) -> LiveSession | None:
        """Put a forgotten session back in memory if a request still holds it."""
        kept = self._forgotten.pop(session_id, None)
        session = None if kept is None else kept()
        return None if session is None or session.deleted else self.add(session)

    async def _learn_images(self, session: LiveSession) -> None:
        """Read the stored images of a session, so that their bytes count and their URLs are not fetched again."""
        stored = await self._news.load_images(session.id)
        session.images.update({part.digest: part for part, _, _ in stored})
        session.image_urls.update({url: part.digest for part, _, url in stored if url is not None})
        # Images that this replica committed during the read are not in it, and stay counted.
        session.image_sizes.update({part.digest: size for part, size, _ in stored})

    async def _load(self, session_id: str) -> LiveSession | InArchive | None:
        """Load a session; None if it does not exist: an error in the task would keep its callers' objects alive."""
        # A text that cannot be an id is not looked up: some databases fail on a NUL character.
        news = await self._news.load_news(session_id, NOTHING_SEEN) if is_session_id(session_id) else None
        if not isinstance(news, News):
            return news
        if news.record is None:
            return None
        session = LiveSession(news.record, InteractionCache(), seen=NOTHING_SEEN)
        for start in range(0, len(news.interactions), _ABSORBED_AT_ONCE):
            part = news.interactions[start : start + _ABSORBED_AT_ONCE]
            seen = news.seen._replace(next_seq=part[-1].seq + 1)
            absorb(session, replace(news, seen=seen, interactions=part), elsewhere=self.shared)
            await asyncio.sleep(0)
        absorb(session, replace(news, interactions=()), elsewhere=self.shared)
        if session.images:
            await self._learn_images(session)
        return self.add(session)


def _is_other(session: LiveSession, news: News) -> bool:
    """Whether the news belongs to a later session with the same id."""
    return news.record is not None and news.record.created_at != session.record.created_at


def _not_found(session_id: str) -> SessionNotFound:
    return SessionNotFound(f"there is no session {brief(session_id)}; start it with POST /rl/start_session")
