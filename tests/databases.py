"""Plain SQL for tests, on SQLite and Postgres, as in a database shell."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine, inspect
from sqlalchemy.pool import NullPool

from proxy.store import database

# Database URLs of tests that name no database, by the test's folder; filled if TOKENGROVE_TEST_DATABASE=postgres.
urls: dict[Path, str] = {}


def execute(url: str, statement: str, *, writable: bool = False) -> list[tuple[Any, ...]]:
    """Run one statement and commit it; return the rows of a query.

    `writable`: also if transactions of the Postgres database are read-only by default.
    """
    engine = create_engine(database.parse_url(url), poolclass=NullPool)
    with engine.begin() as connection:
        if writable:
            connection.exec_driver_sql("SET TRANSACTION READ WRITE")
        result = connection.exec_driver_sql(statement)
        return [tuple(row) for row in result] if result.returns_rows else []


def contents(url: str) -> bytes:
    """Every value of every table, compressed ones decompressed."""
    tables = inspect(create_engine(database.parse_url(url), poolclass=NullPool)).get_table_names()
    rows = chain.from_iterable(execute(url, f"SELECT * FROM {table}") for table in tables)
    return b"\0".join(_decompressed(value) for row in rows for value in row)


def _decompressed(value: Any) -> bytes:
    if not isinstance(value, bytes | memoryview):
        return str(value).encode()
    try:
        return zlib.decompress(value)
    except zlib.error:
        return bytes(value)


@contextmanager
def meanwhile(url: str, statement: str) -> Iterator[None]:
    """Hold a second transaction open, in which one statement has run, during the block."""
    engine = create_engine(database.parse_url(url), poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
        yield


@contextmanager
def stalled_commits(url: str) -> Iterator[None]:
    """Let each Postgres transaction that stores a turn stop at its commit until the end of the block."""
    function = "BEGIN PERFORM pg_advisory_lock_shared(77); PERFORM pg_advisory_unlock_shared(77); RETURN NEW; END"
    execute(url, f"CREATE FUNCTION stall() RETURNS trigger AS $$ {function} $$ LANGUAGE plpgsql")
    execute(
        url,
        "CREATE CONSTRAINT TRIGGER stall AFTER INSERT ON interactions DEFERRABLE INITIALLY DEFERRED "
        "FOR EACH ROW EXECUTE FUNCTION stall()",
    )
    with meanwhile(url, "SELECT pg_advisory_lock(77)"):
        yield
