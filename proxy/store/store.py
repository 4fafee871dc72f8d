"""The store of an event loop: every method returns to the loop at once and is done when the database is.

A write is done when it is committed and on the disk. A read sees every write that was done before it began.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import StoreUnavailable
from proxy.store import claims, database, reads, revisions, rows, schema, starts, writes
from proxy.store.claims import Acknowledged, Acknowledgement, Bell, Claim, Claimed
from proxy.store.reads import Step
from proxy.store.revisions import News, Seen
from proxy.store.starts import Start
from proxy.store.writer import Phase, Writer
from proxy.types import Credit, Interaction, Outcome, SessionRecord, SessionStatus, Status

# Reads are short and mostly decoding under the interpreter's lock; more threads would only wait for each other.
READER_THREADS = 4

# Up to so many ids of sessions are kept in memory (100 bytes each) where nobody else can add one: most requests that
# name a new session then cost no read.
_MAX_KNOWN = 200_000

P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """Sessions, interactions, returns and intents in one database. Build with `open`, end with `close`.

    Every method raises StoreUnavailable when the database refuses or the store is closed.
    """

    def __init__(self, writer_engine: Engine, reader_engine: Engine, lock: database.FileLock | None) -> None:
        self._writer_engine = writer_engine
        self._reader_engine = reader_engine
        self._lock = lock
        self._writer = Writer(writer_engine)
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="store-reader")
        # None: not known, because others write to this database too or there are too many.
        self._known = _known_sessions(reader_engine) if lock is not None else None
        self.ends = Bell()

    @property
    def label(self) -> str:
        """The database as messages name it, without its password."""
        return database.label(self._writer_engine.url)

    @property
    def shared(self) -> bool:
        """Whether others may write to this database too: replicas, of a server that is no SQLite file."""
        return self._lock is None

    @classmethod
    def open(cls, database_url: str, *, migrate: bool | None = None) -> Store:
        """The store at a URL, its tables at the newest revision. Blocks. Raises ConfigurationError with one clear line.

        With `migrate` False an older database is refused; by default only SQLite files are upgraded.
        """
        url = database.parse_url(database_url)
        lock = schema.lock_file(url) if database.is_sqlite(url) else None
        writer_engine = None
        try:
            writer_engine = database.writer_engine(url)
            schema.prepare(writer_engine, migrate=database.is_sqlite(url) if migrate is None else migrate)
            return cls(writer_engine, database.reader_engine(url, READER_THREADS), lock)
        except BaseException:
            if writer_engine is not None:
                writer_engine.dispose()
            if lock is not None:
                lock.release()
            raise

    async def close(self) -> None:
        """Write what is queued, then let go of threads, connections and lock. May be called again."""
        self._writer.stop()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.join()
        self._readers.shutdown()
        self._reader_engine.dispose()
        self._writer_engine.dispose()
        if self._lock is not None:
            self._lock.release()

    # Writes

    async def create_session(
        self,
        record: SessionRecord,
        *,
        chosen_key: bool = False,
        max_live: int | None = None,
        max_taken: int | None = None,
    ) -> None:
        """Raises InvalidRequest (param session_id) when it exists, KeyInUse for a `chosen_key` of a live session.

        Raises TooManyRequests where `max_live` sessions live, or no granted start is left for one that takes capacity.
        """
        if self._known is not None:
            self._known.add(record.session_id)
            if len(self._known) > _MAX_KNOWN:
                self._known = None
        start = Start(rows.session_row(record), chosen_key, max_live, max_taken)
        free = not (chosen_key or record.took_capacity) and max_live is None and max_taken is None
        create = writes.create_freely if free else writes.create_sessions
        await self._writer.submit(create, start, Phase.SESSIONS)

    async def grant_capacity(self, number: int) -> int:
        """Let so many more sessions start; returns how many may now."""
        left: int = await self._writer.submit(starts.grant, number)
        return left

    async def append(self, interaction: Interaction, seen: Seen | None = None) -> int | None:
        """Commit a node; its seq is returned and set. Whoever is cancelled while waiting may find it committed.

        None, and nothing is committed, when the session is no longer as it was `seen`. Raises SessionNotFound, and
        InvalidRequest for a known id or for unequal lengths of a complete node.
        """
        if seen is None:
            seq: int | None = await self._writer.submit(writes.append_interactions, interaction)
        else:
            seq = await self._writer.submit(writes.append_seen, writes.Append(interaction, seen))
        if seq is not None:
            interaction.seq = seq
        return seq

    async def set_rewards(
        self, session_id: str, updates: Mapping[str, Mapping[str, Any]], seen: Seen | None = None
    ) -> bool:
        """Set those of reward, rewards, token_rewards, trainable, spans that are given for each id: all, or none.

        False when the session is no longer as it was `seen`. Raises NotFound for an id that is not of the session,
        InvalidRequest for a value that is not finite.
        """
        done: bool = await self._writer.submit(writes.set_rewards, writes.Rewards(session_id, updates, seen))
        return done

    async def update_session(self, record: SessionRecord, seen: Seen | None = None) -> bool:
        """Replace the record. False when the session is no longer as it was `seen`. Raises SessionNotFound."""
        update = writes.Update(rows.session_row(record), seen)
        done: bool = await self._writer.submit(writes.update_sessions, update)
        return done

    async def end_session(self, record: SessionRecord, returns: Mapping[str, float], seen: Seen | None = None) -> bool:
        """Store the sealed record and its returns, under its own discount and credit, in one commit.

        False when the session is no longer as it was `seen`. Raises SessionNotFound, and NotFound for a return of an
        unknown interaction.
        """
        values = writes.Returns(record.session_id, record.discount, record.credit, dict(returns), seen)
        end = writes.End(rows.session_row(record), values)
        done: bool = await self._writer.submit(writes.end_sessions, end)
        if done:
            self.ends.ring()
        return done

    async def set_returns(
        self,
        session_id: str,
        discount: float,
        credit: Credit,
        values: Mapping[str, float],
        seen: Seen | None = None,
    ) -> bool:
        """Write or overwrite returns by interaction id. False when the session is no longer as it was `seen`.

        Raises SessionNotFound and NotFound.
        """
        new = writes.Returns(session_id, discount, credit, dict(values), seen)
        done: bool = await self._writer.submit(writes.set_returns, new)
        return done

    async def supersede(self, interaction_id: str) -> None:
        """A retry replaces this failed or aborted attempt. Raises NotFound."""
        await self._writer.submit(writes.supersede, interaction_id)

    async def claim(self, claim: Claim) -> Claimed:
        """Lease ended sessions, or those again that a claim of this name holds."""
        claimed: Claimed = await self._writer.submit(claims.claim, claim)
        return claimed

    async def acknowledge(self, done: Acknowledgement) -> Acknowledged:
        """End the leases of sessions for good. Raises SessionNotFound, and InvalidRequest for one that lives."""
        acknowledged: Acknowledged = await self._writer.submit(claims.acknowledge, done)
        return acknowledged

    # Notes: in the same queue, not waited for

    def note_begun(self, interaction_id: str, session_id: str) -> None:
        """A call began; the append of its interaction ends the note."""
        row = {"interaction_id": interaction_id, "session_id": session_id, "begun_at": time.time()}
        self._writer.note(writes.insert_intents, row, Phase.FIRST)

    def note_exported(self, session_ids: Sequence[str]) -> None:
        """These sessions were exported whole. Those that have ended may be pruned one day."""
        row = {"of_sessions": list(session_ids), "exported_at": time.time()}
        self._writer.note(writes.set_exported, row, Phase.LAST)

    def note_replied(self, interaction_id: str) -> None:
        """The end of the reply was written out."""
        row = {"of_interaction": interaction_id, "replied_at": time.time()}
        self._writer.note(writes.set_replied, row, Phase.LAST)

    # Reads

    async def load_session(self, session_id: str) -> SessionRecord | None:
        if self._cannot_be(session_id):
            return None
        return await self._read(reads.load_session, session_id)

    async def load_interactions(
        self, session_id: str, after_seq: int = -1, statuses: Collection[Status] | None = None
    ) -> list[Interaction]:
        """Nodes with a seq above `after_seq`, by seq, of any status or of `statuses`."""
        return await self._read(reads.load_interactions, session_id, after_seq, statuses)

    async def load_tokens(self, session_id: str) -> list[Interaction]:
        """As load_interactions, but only roots have their messages: those are most of what is decoded."""
        return await self._read(reads.load_tokens, session_id)

    async def load_steps(self, session_ids: Collection[str]) -> dict[str, list[Step]]:
        """What rewards and groups are computed of, by session and in order of seq, of at most 10,000 sessions."""
        return await self._read(reads.load_steps, session_ids)

    async def load_news(self, session_id: str, seen: Seen) -> News | None:
        """What others did to a session since it was `seen`; None when there is no such session."""
        if self._cannot_be(session_id):
            return None
        return await self._read(revisions.load_news, session_id, seen)

    async def live_sessions(self, session_ids: Collection[str]) -> set[str]:
        """Those of at most 10,000 sessions that have not ended."""
        return await self._read(revisions.live_sessions, session_ids)

    async def find_sessions(
        self,
        *,
        session_ids: Collection[str] | None = None,
        group_id: str | None = None,
        task_id: str | None = None,
        status: SessionStatus | None = None,
        outcome: Outcome | None = None,
        since: float | None = None,
        after: str | None = None,
        limit: int | None = None,
    ) -> list[SessionRecord]:
        """Records in order of creation. `after` is the last session_id of the page before; `since` is Unix seconds.

        `since` keeps sessions that ended then or later, and live ones. Raises InvalidRequest for an unknown `after`
        (param cursor) and for more than 10,000 `session_ids`.
        """
        wanted = reads.SessionFilter(session_ids, group_id, task_id, status, outcome, since, after, limit)
        return await self._read(reads.find_sessions, wanted)

    async def find_session_by_key(self, key_hash: str, *, control: bool = False) -> SessionRecord | None:
        """The newest live session with this api_key_hash (or control_key_hash), else the newest."""
        return await self._read(reads.find_session_by_key, key_hash, control=control)

    async def find_interaction_session(self, interaction_id: str) -> str | None:
        """The session_id of an interaction."""
        return await self._read(reads.find_interaction_session, interaction_id)

    async def load_returns(self, session_id: str) -> dict[tuple[str, float, Credit], float]:
        """Stored returns by (interaction id, discount, credit)."""
        return await self._read(reads.load_returns, session_id)

    async def load_begun(self, session_id: str) -> dict[str, float]:
        """Ids of calls that began and have not ended, with the Unix seconds of their begin."""
        return await self._read(reads.load_begun, session_id)

    async def load_unreplied(self, session_id: str) -> set[str]:
        """Ids of complete interactions the end of whose reply was never written out."""
        return await self._read(reads.load_unreplied, session_id)

    async def find_incomplete(self, session_ids: Collection[str]) -> set[str]:
        """Those of at most 10,000 sessions of which calls are missing: failed, aborted, or begun and not ended."""
        return await self._read(reads.find_incomplete, session_ids)

    async def is_waiting(self, wanted: reads.SessionFilter) -> bool:
        """Whether an ended session waits to be claimed."""
        return await self._read(claims.is_waiting, wanted)

    async def sessions_of_claim(self, claim_id: str) -> list[str]:
        """What a claim was given and nobody took over, acknowledged or not, in order of their ends."""
        return await self._read(claims.sessions_of, claim_id)

    async def count_live(self) -> int:
        """How many sessions have not ended."""
        return await self._read(starts.count_live)

    async def count_taken(self) -> int:
        """How many sessions live, or have ended without failing."""
        return await self._read(starts.count_taken)

    async def find_idle(self, before: float, limit: int) -> list[str]:
        """Live sessions in which nothing was committed, rewarded or begun since `before` (Unix seconds)."""
        return await self._read(reads.find_idle, before, limit)

    async def count_sessions(self, task_id: str) -> int:
        """How many sessions a task has: where to begin looking for a free `<task_id>-<n>`."""
        return await self._read(reads.count_sessions, task_id)

    async def ping(self) -> None:
        """Raises StoreUnavailable unless the database answers and the writer runs."""
        if not self._writer.running:
            raise StoreUnavailable("the writer of the database has ended")
        await self._read(reads.ping)

    def _cannot_be(self, session_id: str) -> bool:
        """Whether a session is known not to exist, without a read."""
        return self._known is not None and session_id not in self._known and self._writer.running

    async def _read(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        if not self._writer.running:
            raise StoreUnavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, lambda: _read(self._reader_engine, read, *args, **kwargs)
        )


def _known_sessions(engine: Engine) -> set[str] | None:
    known = _read(engine, reads.session_ids, _MAX_KNOWN + 1)
    return set(known) if len(known) <= _MAX_KNOWN else None


def _read(engine: Engine, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        with engine.connect() as connection:
            return read(connection, *args, **kwargs)
    except SQLAlchemyError as error:
        raise StoreUnavailable(f"the database refused a read: {getattr(error, 'orig', None) or error}") from error
