"""A copy of some sessions in a temporary SQLite file, which is read like the database.

So an export of archived sessions runs the code of any other export, on equal rows.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, exists, select

from proxy.store import database
from proxy.store.archive.parquet import Entries
from proxy.store.backup import add_session
from proxy.store.open_database import READER_THREADS
from proxy.store.recordings import SessionReads
from proxy.store.sql.tables import metadata, sessions
from proxy.store.stored_images import StoredImages

P = ParamSpec("P")
T = TypeVar("T")


class Scratch:
    """Fill it once, read it, and close it, which deletes the file."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="tokengrove-archive-"))
        self._url = database.parse_url(f"sqlite:///{self._folder / 'sessions.db'}")
        self._readers = database.reader_engine(self._url, READER_THREADS)
        self.recordings, self.images = SessionReads(self), StoredImages(self)

    @contextmanager
    def filling(self) -> Iterator[Callable[[Entries, int, str], None]]:
        """Yield a function that adds a session, given its entries, its number and where they come from."""
        engine = database.writer_engine(self._url)
        try:
            with engine.begin() as connection:
                metadata.create_all(connection)

                def add(entries: Entries, number: int, name: str) -> None:
                    taken = connection.execute(select(exists().where(sessions.c.number == number))).scalar()
                    add_session(connection, entries, None if taken else number, name)

                yield add
        finally:
            engine.dispose()

    async def read(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` on a connection, in a thread."""

        def run() -> T:
            with self._readers.begin() as connection:
                return read(connection, *args, **kwargs)

        return await asyncio.to_thread(run)

    def close(self) -> None:
        """Delete the copy. May be called again."""
        self._readers.dispose()
        shutil.rmtree(self._folder, ignore_errors=True)
