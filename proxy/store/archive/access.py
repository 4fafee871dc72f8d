"""How an archive reaches a database: with connections of its own, for commands, or through those of an open server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from threading import Lock
from typing import Any, TypeVar
from zlib import crc32

from sqlalchemy import Connection, Engine, text
from sqlalchemy.exc import OperationalError, SQLAlchemyError

from proxy.store import database, schema
from proxy.store.archive.archive import Archive
from proxy.store.faults import reason_of
from proxy.store.open_database import OpenDatabase
from proxy.store.pruning import repeated
from tokengrove.errors import ConfigurationError

T = TypeVar("T")
_PLACE, _SWEEP = crc32(b"archive"), crc32(b"retention")


class _OwnConnections:
    """The connections of a command."""

    def __init__(self, writer: Engine, reader: Engine, holder: Engine | None) -> None:
        """`holder`: connects for the place of the one archive; None: the file is locked by this process."""
        self._writer, self._reader, self._holder = writer, reader, holder

    def read(self, read: Callable[[Connection], T]) -> T:
        with self._reader.begin() as connection:
            return read(connection)

    def change(self, change: Callable[[Connection], T]) -> T:
        return repeated(self._writer, change)

    def alone(self) -> AbstractContextManager[None]:
        return nullcontext() if self._holder is None else _held(self._holder)


class ServedConnections:
    """The connections of an open store. All methods block, so call them in a thread; `loop` runs the server."""

    def __init__(self, opened: OpenDatabase, loop: asyncio.AbstractEventLoop) -> None:
        self._opened, self._loop, self._lock = opened, loop, Lock()

    def read(self, read: Callable[[Connection], T]) -> T:
        return self._opened.read_now(read)

    def change(self, change: Callable[[Connection], T]) -> T:
        async def submitted() -> T:
            found: T = await self._opened.write.submit(_apply, change)
            return found

        return asyncio.run_coroutine_threadsafe(submitted(), self._loop).result()

    @contextmanager
    def alone(self) -> Iterator[None]:
        with self._lock:
            if not self._opened.shared:
                yield
                return
            holder = database.writer_engine(self._opened.url, self._opened.owner)
            try:
                with _held(holder):
                    yield
            finally:
                holder.dispose()


@contextmanager
def archive_of(database_url: str) -> Iterator[Archive]:
    """Open the archive of a database without a server. Raises ConfigurationError.

    A SQLite database must not be in use by a server.
    """
    url = database.parse_url(database_url)
    lock = schema.lock_file(url) if database.is_sqlite(url) else None
    engines: list[Engine] = []
    try:
        writer = database.writer_engine(url)
        engines.append(writer)
        schema.prepare(writer, migrate=False)
        engines.append(database.reader_engine(url, 1))
        # Not for SQLite: opening and closing the file would drop the locks that this process has on it.
        holder = None if database.is_sqlite(url) else database.writer_engine(url)
        engines += [] if holder is None else [holder]
        try:
            yield Archive(_OwnConnections(writer, engines[1], holder))
        except SQLAlchemyError as error:
            raise ConfigurationError(f"the database {database.label(url)} failed: {reason_of(error)}") from None
    finally:
        for engine in engines:
            engine.dispose()
        if lock is not None:
            lock.release()


@contextmanager
def first_of(opened: OpenDatabase) -> Iterator[bool]:
    """Hold the place of the one server that sweeps a database; False if another one holds it. Blocks."""
    if not opened.shared:
        yield True
        return
    engine = database.writer_engine(opened.url, opened.owner)
    try:
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            yield bool(connection.execute(text("SELECT pg_try_advisory_lock(:place)"), {"place": _SWEEP}).scalar())
    finally:
        engine.dispose()  # which ends the session, and with it the lock


def _apply(connection: Connection, batch: Sequence[Callable[[Connection], Any]]) -> Sequence[Any]:
    return [change(connection) for change in batch]


@contextmanager
def _held(engine: Engine) -> Iterator[None]:
    """Hold the place of the one archive of a PostgreSQL database."""
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        try:
            connection.execute(text("SELECT pg_advisory_lock(:place)"), {"place": _PLACE})
        except OperationalError as error:
            raise ConfigurationError(
                f"another tokengrove is writing this database's archive; try again later ({reason_of(error)})"
            ) from None
        try:
            yield
        finally:
            connection.execute(text("SELECT pg_advisory_unlock(:place)"), {"place": _PLACE})
