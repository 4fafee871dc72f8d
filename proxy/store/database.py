"""The differences between SQLite and PostgreSQL: URLs, connections, pragmas, and the lock file of a SQLite file.

One process at a time serves a SQLite file. The kernel holds the lock and releases it when the process ends,
even by a crash.
"""

from __future__ import annotations

import os
import re
import sqlite3
import sys
from contextlib import closing, suppress
from pathlib import Path
from sqlite3 import Connection as SqliteConnection
from sqlite3 import connect
from typing import Any

from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url, text
from sqlalchemy.exc import ArgumentError, NoSuchModuleError

from proxy.store import migrations
from proxy.store.sql.statement import Statement
from tokengrove.errors import ConfigurationError

# Without a registered adapter, the driver searches each such value for an adapting method, which takes half a
# microsecond. These adapters return the value unchanged, and a `bool` as the driver would store it.
sqlite3.register_adapter(type(None), {None: None}.get)
sqlite3.register_adapter(bytes, bytes)
sqlite3.register_adapter(bool, int)

# How long a statement waits for another process that writes to the same SQLite file, such as a shell.
BUSY_TIMEOUT_MS = 5_000

_WRITER_PRAGMAS = (
    *("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", f"busy_timeout={BUSY_TIMEOUT_MS}"),
    # Pages that many commits change, such as index pages, are then copied from the log to the file half as often.
    "wal_autocheckpoint=2000",
)
# Timeouts: a database server that is unreachable is noticed within seconds, and a replica that hangs in a transaction
# holds the locks of its sessions for a minute at most.
_POSTGRES_CONNECTION = {
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "options": "-c lock_timeout=20s -c idle_in_transaction_session_timeout=60s "
    # PostgreSQL then also notices within half a minute that the machine of a replica is gone.
    "-c tcp_keepalives_idle=10 -c tcp_keepalives_interval=5 -c tcp_keepalives_count=3",
}
# The application name of a PostgreSQL connection. It is followed by the revision of the code, which `upgrade` reads,
# and the process, which tells `sql.begun` whose calls still run.
_PROGRAM = "tokengrove "
# PostgreSQL also accepts passwords in the query.
_PASSWORDS = ("password", "sslpassword")
_SECRET = re.compile(r"(?<=:)[^/].*(?=@)|(?<=password=)[^&]*")
_READER_PRAGMAS = ("query_only=ON", f"busy_timeout={BUSY_TIMEOUT_MS}")
_BEGIN_WRITING, _BEGIN_READING = Statement(text("BEGIN IMMEDIATE")), Statement(text("BEGIN"))


def parse_url(given: str) -> URL:
    """Return the URL with its driver and, for SQLite, an absolute path. Raises ConfigurationError if it is unusable."""
    try:
        url = make_url(given)
    except (ArgumentError, ValueError):
        raise ConfigurationError(
            f"--database-url {_SECRET.sub('***', given)!r} is not a database URL; give one such as sqlite:///tokengrove.db"
        ) from None
    if url.get_backend_name() == "sqlite":
        return _sqlite_url(url)
    if url.get_backend_name() in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    raise ConfigurationError(
        f"--database-url {label(url)} is neither SQLite nor PostgreSQL; give sqlite:///FILE or postgresql://..."
    )


def label(url: URL) -> str:
    """The name of the database in messages: the path of a file, else the URL without its passwords."""
    if url.get_backend_name() == "sqlite" and url.database:
        return url.database
    shown = url.difference_update_query(_PASSWORDS)
    return shown.set(drivername=url.get_backend_name()).render_as_string(hide_password=True)


def is_sqlite(url: URL) -> bool:
    """Return True for SQLite, False for PostgreSQL."""
    return url.get_backend_name() == "sqlite"


def writer_engine(url: URL, owner: str = "") -> Engine:
    """An engine of one connection whose transactions begin with the write lock. Raises ConfigurationError.

    `owner`: the process that PostgreSQL shows for its connections (see `sql.begun`).
    """
    engine = _engine(url, size=1, isolation="READ COMMITTED", owner=owner)
    if is_sqlite(url):
        _create_private(url)
        _prepare(engine, _WRITER_PRAGMAS, begin=_BEGIN_WRITING)
    return engine


def reader_engine(url: URL, size: int, owner: str = "") -> Engine:
    """Like `writer_engine`, with `size` read-only connections; each transaction reads one snapshot."""
    engine = _engine(url, size=size, isolation="REPEATABLE READ", owner=owner)
    if is_sqlite(url):
        _prepare(engine, _READER_PRAGMAS, begin=_BEGIN_READING)
        return engine
    return engine.execution_options(postgresql_readonly=True)


def revision_of(program: str) -> str | None:
    """The revision of the code behind a PostgreSQL connection, by its `application_name`; None for other programs."""
    return program.removeprefix(_PROGRAM).partition(" ")[0] if program.startswith(_PROGRAM) else None


def shrink(url: URL) -> None:
    """Free the disk space of deleted rows in a SQLite file. PostgreSQL reuses it by itself.

    Raises ConfigurationError. The disk needs room for a copy of the remaining rows.
    """
    if is_sqlite(url):
        try:
            with closing(connect(label(url), isolation_level=None)) as connection:
                connection.execute("VACUUM")
        except sqlite3.Error as error:
            raise ConfigurationError(
                f"what was pruned is deleted, but {label(url)} cannot be made smaller: {error}; new sessions take the "
                "space, or give the disk room for a copy of the file and prune again"
            ) from None


def empty_log(url: URL) -> bool:
    """Copy the write-ahead log of a SQLite file to the file and empty the log, which still contains deleted data.

    Return False, with the log unchanged, if readers or writers hold it for too long, or the disk fails.
    """
    try:
        with closing(connect(label(url), isolation_level=None, timeout=BUSY_TIMEOUT_MS / 1000)) as connection:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    except sqlite3.Error:
        return False
    return not busy


def check_file(url: URL) -> None:
    """Raise ConfigurationError if a SQLite file can neither be opened nor created there."""
    path = Path(label(url))
    if not path.parent.is_dir():
        raise ConfigurationError(f"the folder of the database, {path.parent}, does not exist; create it first")
    if path.is_dir():
        raise ConfigurationError(f"the database {path} is a folder; give a file in --database-url")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigurationError(f"the database {path} cannot be written: permission denied")


class FileLock:
    """Holds `<database>.lock` until `release` or the end of the process. Raises ConfigurationError if taken."""

    def __init__(self, url: URL) -> None:
        database = Path(label(url))
        path = database.with_name(database.name + ".lock")
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise ConfigurationError(f"the database lock {path} cannot be written: {error.strerror}") from None
        if not _try_lock(self._descriptor):
            os.close(self._descriptor)
            raise ConfigurationError(f"the database {database} is in use by another server; stop that one first")
        _held.add(self._descriptor)

    def release(self) -> None:
        """Release the lock. The file stays: if it were removed, two servers could lock two files of that name."""
        if self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)


_held: set[int] = set()


def _close_held() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    # A forked child, such as an engine's worker, shares the lock and would hold it after this process has ended.
    os.register_at_fork(after_in_child=_close_held)


def _try_lock(descriptor: int) -> bool:
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _sqlite_url(url: URL) -> URL:
    if not url.database or url.database == ":memory:" or url.database.startswith("file:"):
        raise ConfigurationError(
            "--database-url needs a SQLite file, such as sqlite:///tokengrove.db; a database in memory is not durable"
        )
    # Absolute, with links resolved: a later chdir opens the same file, and two names of one file share its lock.
    return url.set(drivername="sqlite", database=os.path.realpath(url.database))


def _create_private(url: URL) -> None:
    """Create a missing SQLite file for its owner only. SQLite gives `-wal` and `-shm` the mode of the file."""
    with suppress(OSError):  # opening the file raises the error with the reason
        os.close(os.open(label(url), os.O_RDWR | os.O_CREAT, 0o600))


def _engine(url: URL, size: int, isolation: str, owner: str) -> Engine:
    options: dict[str, Any] = {"pool_size": size, "max_overflow": 0, "hide_parameters": True}
    if is_sqlite(url):
        # The driver starts no transactions of its own; `on_begin` below starts them.
        options["connect_args"] = {"isolation_level": None}
    else:
        # Positional parameters, as in SQLite: `sql.statement` gives both drivers tuples.
        options |= {"pool_pre_ping": True, "paramstyle": "format"}
        arguments = {**_POSTGRES_CONNECTION, "application_name": f"{_PROGRAM}{migrations.head()} {owner}".rstrip()}
        options |= {"connect_args": arguments, "isolation_level": isolation}
    try:
        return create_engine(url, **options)
    except (ModuleNotFoundError, NoSuchModuleError):
        raise ConfigurationError(
            "PostgreSQL needs a driver: pip install 'tokengrove[postgres]', or use a sqlite:/// URL"
        ) from None


def _prepare(engine: Engine, pragmas: tuple[str, ...], begin: Statement) -> None:
    def on_connect(connection: SqliteConnection, _record: object) -> None:
        for pragma in pragmas:
            connection.execute(f"PRAGMA {pragma}").close()

    def on_begin(connection: Connection) -> None:
        begin.run(connection, [{}])

    event.listen(engine, "connect", on_connect)
    event.listen(engine, "begin", on_begin)
