"""The backlog of the database, cached for clients that poll it.

The database is queried at most every 10 s, by one query at a time, for at most a twentieth of the time. If it does not
answer in time, the backlog is unknown: an older answer is never returned instead.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence

from proxy.store.open_database import OpenDatabase
from proxy.store.sql import backlog
from proxy.store.sql.backlog import Backlog, RouteBacklog
from tokengrove.errors import StoreUnavailable

MOST_COUNTED = 100_000
"""The limit of each count."""
ANSWER_S = 3.0
_EVERY_S = 10.0
_SHARE = 20


class CountedBacklog:
    """Queries the database. Use it on one event loop.

    `routes`: the trained routes besides the server's own. `by_route`: their counts at the last query.
    """

    def __init__(self, database: OpenDatabase) -> None:
        self._database = database
        self._asking: asyncio.Task[Backlog | None] | None = None
        self._again_at = 0.0
        self.routes: Sequence[str] = ()
        self.by_route: Mapping[str, RouteBacklog] = {}

    async def read(self) -> Backlog | None:
        """The counts of the last 10 s (older if the query was slow); None if the database does not answer."""
        if self._asking is None or (self._asking.done() and time.monotonic() >= self._again_at):
            self._asking = asyncio.create_task(self._ask())
        await asyncio.wait([self._asking], timeout=ANSWER_S)
        return self._asking.result() if self._asking.done() else None

    async def _ask(self) -> Backlog | None:
        begun = time.monotonic()
        try:
            if self.routes:
                self.by_route = await self._database.read_at_once(
                    backlog.count_routes, self.routes, MOST_COUNTED, time.time()
                )
            return await self._database.read_at_once(backlog.count, MOST_COUNTED, time.time())
        except StoreUnavailable:
            return None
        finally:
            now = time.monotonic()
            self._again_at = now + max(_EVERY_S, _SHARE * (now - begun))
