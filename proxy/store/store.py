"""The open store: sessions, turns, rewards, keys and claims. Each kind of caller gets only one part.

No method of a part blocks the event loop. Each completes when the database has, and raises StoreUnavailable if the
database refuses or the store is closed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from uuid import uuid4

from proxy.store import database, schema
from proxy.store.absence import Patience
from proxy.store.annotations import Annotations
from proxy.store.answers import Answers
from proxy.store.bell import Bell
from proxy.store.claim_queue import ClaimQueue
from proxy.store.counted_backlog import CountedBacklog
from proxy.store.engine_pauses import EnginePauses
from proxy.store.key_index import KeyIndex
from proxy.store.known_sessions import KnownSessions
from proxy.store.open_database import READER_THREADS, OpenDatabase
from proxy.store.outbox import Outbox
from proxy.store.recordings import Recordings
from proxy.store.replica_news import ReplicaNews
from proxy.store.session_changes import SessionChanges
from proxy.store.session_starts import SessionStarts
from proxy.store.sql import begun, reads, writes
from proxy.store.stored_images import StoredImages
from proxy.store.turn_log import TurnLog
from tokengrove.errors import StoreUnavailable


class Store:
    """Sessions, interactions, returns and intents in one database. Build with `open`, end with `close`.

    `turns`: the log that turns are committed to.
    `starts`: new sessions and the limits of their number.
    `changes`: changes of a session's record, its rewards, its returns and its end.
    `news`: changes by other replicas, and running calls.
    `keys`: sessions by key.
    `recordings`: reads for listings and exports.
    `claims`: the trainers' queue of ended sessions.
    `backlog`: the number of sessions that are active or wait in that queue.
    `changed`: the sessions that changed recently.
    `metrics`: the metrics of all parts.
    `pauses`: notes about paused engine servers.
    `images`: images of conversations, by digest.
    `annotations`: what trainers told of tokens.
    `answers`: answers to control calls, for clients that repeat a call.
    `outbox`: events for receivers of webhooks.
    """

    def __init__(self, opened: OpenDatabase, webhooks: Sequence[str] = ()) -> None:
        self.database = opened
        known = KnownSessions(
            None if opened.shared else lambda after, most: opened.read(reads.session_ids, after, most)
        )
        ends = Bell()
        self.turns = TurnLog(opened)
        self.starts = SessionStarts(opened, known)
        self.outbox = Outbox(opened, webhooks)
        self.changes = SessionChanges(opened, ends, self.outbox)
        self.news = ReplicaNews(opened, known)
        self.keys = KeyIndex(opened, known)
        self.recordings = Recordings(opened)
        self.claims = ClaimQueue(opened, ends)
        self.backlog = CountedBacklog(opened)
        self.changed = opened.changed
        self.metrics = opened.metrics
        self.pauses = EnginePauses(opened)
        self.images = StoredImages(opened)
        self.answers = Answers(opened)
        self.annotations = Annotations(opened)

    @property
    def label(self) -> str:
        """The name of the database in messages, without its password."""
        return self.database.label

    @classmethod
    def open(
        cls,
        database_url: str,
        *,
        migrate: bool | None = None,
        patience: Patience | None = None,
        webhooks: Sequence[str] = (),
    ) -> Store:
        """Open the store at a URL with its tables at the newest revision. Blocks.

        `migrate`: upgrade older tables (True), or refuse them (False); None upgrades SQLite files only.
        `patience`: the wait for a database that becomes unavailable later; None: no wait.
        `webhooks`: URLs that are told of events. Raises ConfigurationError.
        """
        url = database.parse_url(database_url)
        lock = schema.lock_file(url) if database.is_sqlite(url) else None
        owner = uuid4().hex[:16]
        writer_engine = None
        try:
            writer_engine = database.writer_engine(url, owner)
            schema.prepare(writer_engine, migrate=database.is_sqlite(url) if migrate is None else migrate)
            cut_off = begun.disown_all(writer_engine) if lock is not None else True
            # One connection for each reader thread, and one that `SharedReads` keeps.
            readers = database.reader_engine(url, READER_THREADS + 1, owner)
            return cls(OpenDatabase(writer_engine, readers, lock, owner, patience, cut_off=cut_off), webhooks)
        except BaseException:
            if writer_engine is not None:
                writer_engine.dispose()
            if lock is not None:
                lock.release()
            raise

    async def close(self) -> None:
        """Commit the queued changes, then release threads, connections and the lock. May be called again."""
        self.turns.queue_notes()
        await self.database.close()

    @property
    def refused(self) -> bool:
        """See OpenDatabase."""
        return self.database.refused

    async def ping(self) -> bool:
        """Return whether the database answers and accepts writes; False while it is unavailable and calls wait for it.

        Raises StoreUnavailable if it refuses, is unavailable for longer, or the writer thread has ended. Writes only if
        the last commit was refused or the database is unavailable, to find out when that is over.
        """
        if not self.database.running:
            raise StoreUnavailable("the database writer has stopped; restart the server")
        if not self.database.absence.is_waited_for:
            try:
                return await self._answers()
            except StoreUnavailable:
                if not self.database.absence.is_waited_for:
                    raise
        with suppress(StoreUnavailable):  # too many calls wait; they will show when it is back
            self.database.look_for_it()
        return False

    async def _answers(self) -> bool:
        await self.database.read_at_once(reads.ping)
        if await self.database.read_at_once(reads.is_read_only):
            self.database.renew()
            raise StoreUnavailable("the database takes no writes: it is read-only")
        if self.database.write.refusal is not None:
            await self.database.write.submit(writes.probe, None)
        return True
