"""The connections of an open store: one writer thread with a queue, and a few reader threads.

A write is done when it is committed and on the disk. A read sees every write that was done before the read began.
Both wait while the database is unavailable (`absence`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.store import database
from proxy.store.absence import Patience, pause_s
from proxy.store.answer import Noted
from proxy.store.changed_sessions import ChangedSessions
from proxy.store.faults import is_away
from proxy.store.news import InArchive, News, Seen
from proxy.store.outage import Outage
from proxy.store.rehearsal import rehearse_turn
from proxy.store.shared_reads import SharedReads, refused_read
from proxy.store.sql import reads, writes
from proxy.store.sql.answers import Answered, answered
from proxy.store.writer import Writer
from proxy.telemetry.groups import StoreMetrics
from tokengrove.errors import StoreUnavailable

logger = logging.getLogger(__name__)

# Reads are short and mostly decode under the interpreter's lock; more threads would only wait for each other.
READER_THREADS = 4
# The interval at which a process that may be idle checks its connection.
_PRESENT_S = 5.0

P = ParamSpec("P")
T = TypeVar("T")


class OpenDatabase:
    """Owns the writer, the readers and, for SQLite, the lock of the file. The parts of the store share it.

    `write` queues changes (see Writer). `shared`: True if other replicas may also write to the database, which is the
    case on PostgreSQL; a SQLite file is locked by one process. `shared_reads` then reads their changes. `changed`: the
    sessions that changed through this process. `owner`: the name of this process in the notes of its begun calls.
    `url`: of the database. `absence`: whether the database is unavailable, and whether calls wait for it. `cut_off`:
    calls of other processes may have begun and not ended.
    """

    def __init__(
        self,
        writer_engine: Engine,
        reader_engine: Engine,
        lock: database.FileLock | None,
        owner: str,
        patience: Patience | None = None,
        *,
        cut_off: bool = True,
    ) -> None:
        self.cut_off = cut_off
        self.metrics = StoreMetrics()
        self.changed = ChangedSessions()
        self.write = Writer(writer_engine, self.metrics, self.renew, patience)
        self.absence = self.write.absence
        self._back: asyncio.Future[None] | None = None
        self.shared = lock is None
        self.owner = owner
        self.label = database.label(writer_engine.url)
        self.url = writer_engine.url
        self._writer_engine = writer_engine
        self._reader_engine = reader_engine
        self._lock = lock
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="store-reader")
        self._outage = Outage("reads")
        self.shared_reads = SharedReads(reader_engine, self._readers, self._outage, self.absence)

    @property
    def running(self) -> bool:
        """True until the store is closed or the writer thread has ended."""
        return self.write.running

    @property
    def refused(self) -> bool:
        """True if the writer has stopped, or the database refused the last transaction or is unavailable."""
        return not self.running or self.write.refusal is not None or self.absence.since is not None

    async def read(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` in a reader thread. Raises StoreUnavailable when closed or refused.

        Waits while the database is unavailable.
        """
        if self.absence.since is not None:
            return await self._read_later(None, lambda: self.read_at_once(read, *args, **kwargs))
        try:
            return await self.read_at_once(read, *args, **kwargs)
        except StoreUnavailable as error:
            return await self._read_later(error, lambda: self.read_at_once(read, *args, **kwargs))

    async def new_turns(self, session_id: str, seen: Seen) -> News | InArchive | None:
        """Like `SharedReads.new_turns`, but waits while the database is unavailable."""
        if self.absence.since is not None:
            return await self._read_later(None, lambda: self.shared_reads.new_turns(session_id, seen))
        try:
            return await self.shared_reads.new_turns(session_id, seen)
        except StoreUnavailable as error:
            return await self._read_later(error, lambda: self.shared_reads.new_turns(session_id, seen))

    async def read_at_once(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `read`, but raise StoreUnavailable at once if the database is unavailable."""
        if not self.write.running:
            raise StoreUnavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, lambda: self.read_now(read, *args, **kwargs)
        )

    def read_now(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` in this thread. Blocks. Raises StoreUnavailable when the database refuses."""
        away = self.absence.since
        try:
            with self._reader_engine.begin() as connection:
                result = read(connection, *args, **kwargs)
        except SQLAlchemyError as error:
            raise refused_read(error, self._outage, self.absence) from error
        self._outage.over()
        if away is not None:
            self.absence.over(away)
        return result

    async def stay_present(self) -> None:
        """Keep a connection open until cancelled. It shows other servers that the calls of this process still run."""
        while self.shared:
            await asyncio.sleep(_PRESENT_S)
            await self.show_presence()

    async def show_presence(self) -> None:
        """Connect again if the connections were lost and no call has used one since."""
        try:
            await self.read_at_once(reads.ping)
        except StoreUnavailable:
            pass
        except Exception:
            logger.exception("whether the database is there could not be seen")

    def submit_noted(
        self, write: writes.BatchWrite, payload: Any, noted: Noted | None, *, urgent: bool = True
    ) -> asyncio.Future[Any]:
        """Like `Writer.submit`; the answer that `noted` makes from the result is stored in the same transaction."""
        if noted is None:
            return self.write.submit(write, payload, urgent=urgent)
        return self.write.submit(answered, Answered(write, payload, noted))

    def look_for_it(self) -> asyncio.Future[None]:
        """A future that is done when the database accepts writes; raises StoreUnavailable if the wait ends first."""
        loop = asyncio.get_running_loop()
        if self._back is None or self._back.done() or self._back.get_loop() is not loop:
            self._back = self.write.submit(writes.probe, None)
            self._back.add_done_callback(lambda back: back.cancelled() or back.exception())
        return self._back

    async def _read_later(self, error: StoreUnavailable | None, read: Callable[[], Awaitable[T]]) -> T:
        """Read when the database is available. `error`: of the last read; raised unless a retry may help."""
        loop = asyncio.get_running_loop()
        until, tries = loop.time() + self.absence.patience.wait_s, 0
        while True:
            late = self.absence.given_up or loop.time() >= until
            if error is not None and (late or not is_away(error.__cause__)):
                self._count_waited(tries, "refused")
                raise error
            if self.absence.is_waited_for:
                await self._wait(tries)
            elif tries:
                await asyncio.sleep(pause_s(tries))
            tries += 1
            try:
                result = await read()
            except StoreUnavailable as refused:
                error = refused
            else:
                self._count_waited(tries, "done")
                return result

    async def _wait(self, tries: int) -> None:
        """Wait until the database accepts writes or the wait ends. Raises StoreUnavailable if too many calls wait."""
        self.write.check_room()
        self.write.reading += 1
        try:
            if tries:  # it accepted writes, but a read failed
                await asyncio.sleep(pause_s(tries))
            with suppress(StoreUnavailable):
                await asyncio.shield(self.look_for_it())
        finally:
            self.write.reading -= 1

    def _count_waited(self, tries: int, result: str) -> None:
        if tries:
            self.metrics.waited.by["reads", result] += 1

    def renew(self) -> None:
        """Use new connections from now on: the server of a connection may no longer be the primary."""
        self.write.renew()
        self.shared_reads.renew()
        self._reader_engine.dispose()

    async def erase_log(self) -> None:
        """Also remove deleted data from the write-ahead log of a SQLite file."""
        if not self.shared and not await asyncio.to_thread(database.empty_log, self._writer_engine.url):
            logger.warning("what was deleted stays in the database's write-ahead log for now: it is in use")

    def rehearse(self) -> None:
        """Run the statements of a turn once, so that the first turn is as fast as the next. Blocks."""
        with suppress(SQLAlchemyError):  # the first turn will report the error
            rehearse_turn(self._writer_engine, self._reader_engine)

    async def close(self) -> None:
        """Commit the queued changes, then release threads, connections and the lock. May be called again."""
        self.write.stop()
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self.write.join()
        self._readers.shutdown()
        self.shared_reads.close()
        self._reader_engine.dispose()
        self._writer_engine.dispose()
        if self._lock is not None:
            self._lock.release()
