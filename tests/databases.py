"""Plain SQL for tests, on either database, as somebody with a shell would use it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from proxy.store import database

# Databases of tests that name none, by the test's folder; TOKENGROVE_TEST_DATABASE=postgres fills it.
urls: dict[Path, str] = {}


def execute(url: str, statement: str) -> list[tuple[Any, ...]]:
    """Run one statement and commit it; the rows of a query."""
    engine = create_engine(database.parse_url(url), poolclass=NullPool)
    with engine.begin() as connection:
        result = connection.exec_driver_sql(statement)
        return [tuple(row) for row in result] if result.returns_rows else []


@contextmanager
def meanwhile(url: str, statement: str) -> Iterator[None]:
    """A transaction of somebody else that has run one statement and is still open."""
    engine = create_engine(database.parse_url(url), poolclass=NullPool)
    with engine.begin() as connection:
        connection.exec_driver_sql(statement)
        yield
