"""A database that goes away: SQLite connections that break as those of PostgreSQL do, at statements and at commits.

A connection that breaks at a commit says nothing of whether it was done.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

from sqlalchemy import create_engine
from sqlalchemy.dialects.sqlite.pysqlite import SQLiteDialect_pysqlite

from proxy.store import database, writer
from tests.torture.runs import World


class Away(sqlite3.OperationalError):
    """The connection is lost or refused. As psycopg's error it has no state then."""

    sqlstate = None


class Link:
    """The way to the database. `fragile`: how likely a connection breaks at a statement, `torn`: at a commit."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.down = False
        self.age = 0
        self.fragile = self.torn = 0.0

    async def outages(self) -> None:
        """Be down a few times, and break now and then; then break no more."""
        self.fragile = self._world.random.choice([0.0, 0.002, 0.01])
        self.torn = self._world.random.choice([0.0, 0.1, 0.3])
        for _ in range(self._world.random.randrange(1, 4)):
            await self._world.some_time(1.5)
            self.down, self.age = True, self.age + 1
            await asyncio.sleep(self._world.random.choice([0.05, 0.5, 3.0]))
            self.down = False
        await self._world.some_time(1.0)
        self.fragile = self.torn = 0.0

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let stores that are opened meanwhile come this way, and take this for PostgreSQL where that matters."""

        class Linked(_Connection):
            link = self

        def linked(url: Any, **options: Any) -> Any:
            options["connect_args"] = {**options.get("connect_args", {}), "factory": Linked}
            return create_engine(url, **options, pool_pre_ping=True)

        lost = SQLiteDialect_pysqlite.is_disconnect
        with (
            mock.patch.object(database, "create_engine", linked),
            mock.patch.object(writer, "pipelined", lambda connection: nullcontext()),
            mock.patch.object(
                SQLiteDialect_pysqlite, "is_disconnect", lambda *given: isinstance(given[1], Away) or lost(*given)
            ),
        ):
            yield

    def tears(self) -> bool:
        """Whether a commit that is sent now is not answered."""
        return self._world.loop.chance(self.torn)

    def breaks(self) -> bool:
        """Whether a connection that is used now breaks."""
        return self._world.loop.chance(self.fragile)

    def is_done(self) -> bool:
        """Whether a commit without an answer was done."""
        return self._world.loop.chance(0.5)


class _Connection(sqlite3.Connection):
    link: Link

    def __init__(self, *given: Any, **named: Any) -> None:
        self._age, self._lost = self.link.age, False
        if self.link.down:
            raise Away("connection refused")
        super().__init__(*given, **named)

    def cursor(self, *given: Any, **named: Any) -> Any:
        self._check()
        return super().cursor(*given, **named)

    def commit(self) -> None:
        self._check()
        if self.in_transaction and self.link.tears():
            if self.link.is_done():
                super().commit()
            self._lose()
        super().commit()

    def _check(self) -> None:
        if self._lost or self.link.down or self._age != self.link.age or self.link.breaks():
            self._lose()

    def _lose(self) -> None:
        self._lost = True
        self.rollback()  # as the database does when it sees that nobody is there
        raise Away("the connection is lost")
