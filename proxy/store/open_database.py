"""The connections of an open store: one writer thread with a queue, and a few reader threads.

A write is done when it is committed and on the disk. A read sees every write that was done before the read began.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import StoreUnavailable
from proxy.store import database
from proxy.store.changed_sessions import ChangedSessions
from proxy.store.outage import Outage
from proxy.store.rehearsal import rehearse_turn
from proxy.store.shared_reads import SharedReads, refused_read
from proxy.store.writer import Writer
from proxy.telemetry.store_metrics import StoreMetrics

logger = logging.getLogger(__name__)

# Reads are short and mostly decode under the interpreter's lock; more threads would only wait for each other.
READER_THREADS = 4

P = ParamSpec("P")
T = TypeVar("T")


class OpenDatabase:
    """Owns the writer, the readers and, for SQLite, the lock of the file. The parts of the store share it.

    `write` queues changes (see Writer). `shared`: True if other replicas may write to the database too, so on any
    server; a SQLite file is locked by one process. `shared_reads` then reads what they wrote. `changed`: which
    sessions changed through this process. `owner`: this process in the notes of its begun calls.
    """

    def __init__(
        self, writer_engine: Engine, reader_engine: Engine, lock: database.FileLock | None, owner: str
    ) -> None:
        self.metrics = StoreMetrics()
        self.changed = ChangedSessions()
        self.write = Writer(writer_engine, self.metrics, self.renew)
        self.shared = lock is None
        self.owner = owner
        self.label = database.label(writer_engine.url)
        self._writer_engine = writer_engine
        self._reader_engine = reader_engine
        self._lock = lock
        self._readers = ThreadPoolExecutor(READER_THREADS, thread_name_prefix="store-reader")
        self._outage = Outage("reads")
        self.shared_reads = SharedReads(reader_engine, self._readers, self._outage)

    @property
    def running(self) -> bool:
        """True until the store is closed or the writer thread has ended."""
        return self.write.running

    async def read(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` in a reader thread. Raises StoreUnavailable when closed or refused."""
        if not self.write.running:
            raise StoreUnavailable("the store is closed")
        return await asyncio.get_running_loop().run_in_executor(
            self._readers, lambda: self.read_now(read, *args, **kwargs)
        )

    def read_now(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` in this thread. Blocks. Raises StoreUnavailable when the database refuses."""
        try:
            with self._reader_engine.begin() as connection:
                result = read(connection, *args, **kwargs)
        except SQLAlchemyError as error:
            raise refused_read(error, self._outage) from error
        self._outage.over()
        return result

    def renew(self) -> None:
        """Connect anew for whatever comes next: the server behind a connection may not be the primary any more."""
        self.write.renew()
        self.shared_reads.renew()
        self._reader_engine.dispose()

    async def erase_log(self) -> None:
        """Remove what was deleted from the write-ahead log of a SQLite file too."""
        if not self.shared and not await asyncio.to_thread(database.empty_log, self._writer_engine.url):
            logger.warning("what was deleted stays in the database's write-ahead log for now: it is in use")

    def rehearse(self) -> None:
        """Run the statements of a turn once, so that the first turn is as fast as the next. Blocks."""
        with suppress(SQLAlchemyError):  # the first turn will say what is wrong
            rehearse_turn(self._writer_engine, self._reader_engine)

    async def close(self) -> None:
        """Commit what is queued, then release threads, connections and the lock. May be called again."""
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
