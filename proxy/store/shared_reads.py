"""Reads the changes of a session before each use, if replicas share the database.

Requests that arrive while a query runs share the next query. A read sees every commit that was done before the read
began, because its query begins later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Executor

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.store.absence import Absence
from proxy.store.faults import fault_of, is_away, reason_of
from proxy.store.news import InArchive, News, Seen
from proxy.store.outage import Outage
from proxy.store.sql.revisions import Wanted, load_new_turns
from tokengrove.errors import StoreUnavailable


class SharedReads:
    """Runs one query at a time in a thread of `executor`.

    It keeps its connection, without a transaction, so a query is one round trip.
    """

    def __init__(self, engine: Engine, executor: Executor, outage: Outage, absence: Absence) -> None:
        self._engine, self._executor, self._outage, self._absence = engine, executor, outage, absence
        self._connection: Connection | None = None
        self._renewing = False
        self._waiting: list[tuple[Wanted, asyncio.Future[News | InArchive | None]]] = []
        self._task: asyncio.Task[None] | None = None

    def new_turns(self, session_id: str, seen: Seen) -> asyncio.Future[News | InArchive | None]:
        """The state of a session and its turns since it was `seen`, or where it is archived; None if there is none.

        If the revision also grew, the news has no turns: use `load_news`. The future raises StoreUnavailable.
        """
        future: asyncio.Future[News | InArchive | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(((session_id, seen), future))
        if self._task is None:
            self._task = asyncio.create_task(self._answer())
        return future

    def renew(self) -> None:
        """Reconnect before the next query. May be called in any thread."""
        self._renewing = True

    def close(self) -> None:
        """Close the connection. Blocks."""
        connection, self._connection = self._connection, None
        if connection is not None:
            if not connection.invalidated:
                connection.invalidate()
            connection.close()

    async def _answer(self) -> None:
        while waiting := self._waiting:
            self._waiting = []
            away = self._absence.since
            wanted = [each for each, _ in waiting]
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._executor, self._load, wanted)
            except Exception as error:
                problem = refused_read(error, self._outage, self._absence)
                problem.__cause__ = error
                for _, future in waiting:
                    if not future.done():
                        future.set_exception(problem)
            else:
                self._outage.over()
                if away is not None:
                    self._absence.over(away)
                for (_, future), news in zip(waiting, found, strict=True):
                    if future.done():
                        continue
                    if isinstance(news, Exception):
                        future.set_exception(news)
                    else:
                        future.set_result(news)
        self._task = None

    def _load(self, wanted: Sequence[Wanted]) -> list[News | InArchive | Exception | None]:
        if self._renewing:
            self._renewing = False
            self.close()
        if self._connection is not None:
            try:
                return load_new_turns(self._connection, wanted)
            except SQLAlchemyError:
                self.close()  # the database may have restarted since the last query
        self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        return load_new_turns(self._connection, wanted)


def refused_read(error: Exception, outage: Outage, absence: Absence) -> StoreUnavailable:
    """The client error for a failed read. The reason is logged, unless calls wait for an unavailable database."""
    fault = fault_of(error)
    if is_away(error):
        absence.begin(fault, reason_of(error))
    if not absence.is_waited_for:
        outage.refused(fault, reason_of(error))
    return StoreUnavailable(f"the database refused a read: {fault}")
