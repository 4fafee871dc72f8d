"""How far sessions have come in the database: what a replica asks before each use of a session.

Requests that arrive while a query runs share the next one. A read sees every commit that was done before the read
began, since its query begins later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Executor

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import StoreUnavailable
from proxy.store.news import Seen
from proxy.store.sql.revisions import load_states


class StateReads:
    """Runs one query at a time in a thread of `executor`.

    Its connection is kept, and in no transaction, so a query is one round trip.
    """

    def __init__(self, engine: Engine, executor: Executor) -> None:
        self._engine, self._executor = engine, executor
        self._connection: Connection | None = None
        self._wanted: list[tuple[str, asyncio.Future[Seen | None]]] = []
        self._task: asyncio.Task[None] | None = None

    def read(self, session_id: str) -> asyncio.Future[Seen | None]:
        """The state of a session; None if there is no such session. The future raises StoreUnavailable."""
        future: asyncio.Future[Seen | None] = asyncio.get_running_loop().create_future()
        self._wanted.append((session_id, future))
        if self._task is None:
            self._task = asyncio.create_task(self._answer())
        return future

    def close(self) -> None:
        """Give up the connection. Blocks."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    async def _answer(self) -> None:
        while wanted := self._wanted:
            self._wanted = []
            names = {name for name, _ in wanted}
            try:
                found = await asyncio.get_running_loop().run_in_executor(self._executor, self._load, names)
            except Exception as error:
                reason = getattr(error, "orig", None) or error
                for _, future in wanted:
                    if not future.done():
                        future.set_exception(StoreUnavailable(f"the database refused a read: {reason}"))
            else:
                for name, future in wanted:
                    if not future.done():
                        future.set_result(found.get(name))
        self._task = None

    def _load(self, names: Collection[str]) -> dict[str, Seen]:
        if self._connection is not None:
            try:
                return load_states(self._connection, names)
            except SQLAlchemyError:
                self.close()  # the database may have restarted since the last query
        self._connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        return load_states(self._connection, names)
