"""Indexes the texts of turns in the background, with `--search`.

No turn waits for it: it reads what was committed, and writes many turns at a time, since a transaction costs more than
a turn in it. While turns run, it rests until they have used 19 times the CPU that it used, so it falls behind a server
that is busy for long. Where they use little, it takes one percent of a core.
What is left to do follows from the rows, so a crash loses nothing, and sessions that were recorded before are indexed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from typing import NamedTuple

from sqlalchemy import ColumnElement, Connection, Engine
from sqlalchemy.exc import SQLAlchemyError

from proxy.store import database
from proxy.store.faults import reason_of
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import texts
from proxy.store.sql.texts import Found, Unindexed
from proxy.store.text_search import TextSearch
from tokengrove.errors import ProxyError, StoreUnavailable

logger = logging.getLogger(__name__)

_GATHER_S = 2.0
_FAILED_S = 10.0
_REST, _LONGEST_REST = 19, 99
# What is measured of a step is a part of it: SQLite writes the words at the commit.
_UNSEEN = 1.4
_LOOK_S = 0.5
# Of one step. SQLite's writer is busy for some milliseconds with them.
_TURNS, _CHARACTERS = 256, 512 * 1024
_SESSIONS = 256
_STRAYS = 1000
# How often a PostgreSQL database is searched for the turns of servers that do not index them or died before, and how
# often any for all turns, such as those of old sessions that a command brought back.
_WATCH_S, _SCAN_S = 10.0, 600.0


class Step(NamedTuple):
    """The CPU seconds that a step was seen to take. `full`: it left turns to the next one."""

    seconds: float
    full: bool


class TextIndexer:
    """Indexes the turns of a database. Each process with `--search` runs one; one of them works at a time.

    `search`: learns how far it is. `busy`: whether turns run.
    """

    def __init__(self, opened: OpenDatabase, search: TextSearch, busy: Callable[[], bool]) -> None:
        self._opened, self._search, self._busy = opened, search, busy
        self._place = opened.changed.since(None).place
        self._names: dict[str, None] = {}
        self._watch = False
        self._watched_at = self._scanned_at = time.monotonic()
        self._scanning = self._checking = True
        self._own: Engine | None = None
        self._step_lock = asyncio.Lock()

    async def run(self) -> None:
        """Index until cancelled."""
        while True:
            try:
                step = await self.step()
            except ProxyError as error:
                logger.warning("texts could not be indexed: %(why)s", {"why": error.message})
                await asyncio.sleep(_FAILED_S)
                continue
            if step is None or not step.full:
                await asyncio.sleep(_GATHER_S)
            if step is not None:
                await self._rest(step.seconds * _UNSEEN)

    async def _rest(self, worked_s: float) -> None:
        """Wait, while turns run, until they have used much more CPU."""
        enough, until = time.process_time() + _REST * worked_s, time.monotonic() + _LONGEST_REST * worked_s
        while self._busy() and time.process_time() < enough and (left := until - time.monotonic()) > 0:  # noqa: ASYNC110
            await asyncio.sleep(min(_LOOK_S, left))

    async def catch_up(self) -> None:
        """Index everything that is stored, without rests."""
        self._watch, self._scanning, self._search.scanned = True, True, -1
        while await self.step() is not None:
            pass

    async def close(self) -> None:
        """Close its connection, after `run` was cancelled."""
        if self._own is not None:
            await asyncio.to_thread(self._own.dispose)

    async def step(self) -> Step | None:
        """Index some turns. None: nothing is left, or another process works."""
        async with self._step_lock:
            if self._checking:
                await self._drop_strays()
            self._look_around()
            for find in (self._changed, self._in_use, self._older):
                found = await find()
                if found is not None:
                    worked = await self._index(found.sessions)
                    return None if worked is None else Step(found.seconds + worked, found.more)
            return None

    def _look_around(self) -> None:
        """Note which sessions have changed, and whether others may have."""
        changed = self._opened.changed.since(self._place)
        self._place = changed.place
        self._names.update(dict.fromkeys(changed.ids))
        self._watch |= changed.all
        now = time.monotonic()
        self._watch |= self._opened.shared and now - self._watched_at > _WATCH_S
        if now - self._scanned_at > _SCAN_S and not self._scanning:
            self._scanning, self._search.scanned = True, -1

    async def _changed(self) -> Found | None:
        """Turns of sessions that changed through this process."""
        while names := list(islice(self._names, _SESSIONS)):
            found = await self._read(texts.among(names))
            for name in [each.session_id for each in found.sessions if each.whole] if found.more else names:
                del self._names[name]
            if found.sessions:
                return found
        return None

    async def _in_use(self) -> Found | None:
        """Turns of sessions that are in use, of any process."""
        if not self._watch:
            return None
        found = await self._read(texts.in_use())
        if found.sessions:
            return found
        self._watch, self._watched_at = False, time.monotonic()
        return None

    async def _older(self) -> Found | None:
        """Turns of all sessions, in order of creation."""
        if not self._scanning:
            return None
        newest = await self._opened.read(texts.newest)
        found = await self._read(texts.beyond(self._search.scanned))
        if found.sessions:
            self._search.scanned = found.sessions[0].number - 1
            return found
        self._search.scanned, self._scanning, self._scanned_at = newest, False, time.monotonic()
        return None

    async def _read(self, which: ColumnElement[bool]) -> Found:
        return await self._opened.read(texts.unindexed, which, _TURNS, _CHARACTERS)

    async def _index(self, found: Sequence[Unindexed]) -> float | None:
        done = False
        try:
            if self._opened.shared:
                worked = await asyncio.to_thread(self._index_in_own_transaction, found)
            else:
                worked = await self._opened.write.submit(_index, found, urgent=False)
            done = worked is not None
            for each in found if done else ():
                self._opened.changed.note(each.session_id)  # for who looks at a search
            return worked
        finally:
            if not done:
                self._names.update(dict.fromkeys(each.session_id for each in found))

    def _index_in_own_transaction(self, found: Sequence[Unindexed]) -> float | None:
        """Index through a connection of its own, so that no turn of PostgreSQL waits for the transaction."""
        if self._own is None:
            self._own = database.writer_engine(self._opened.url, self._opened.owner)
        try:
            with self._own.begin() as connection:
                return texts.index(connection, found)
        except SQLAlchemyError as error:
            raise StoreUnavailable(f"the database refused: {reason_of(error)}") from error

    async def _drop_strays(self) -> None:
        while names := await self._opened.read(texts.strays, _STRAYS):
            logger.warning("the text index has sessions that are gone, and drops them", {"sessions": len(names)})
            await self._opened.write.submit(_drop_strays, names)
        self._checking = False


def _index(connection: Connection, batch: Sequence[Sequence[Unindexed]]) -> Sequence[float | None]:
    return [texts.index(connection, found) for found in batch]


def _drop_strays(connection: Connection, batch: Sequence[Collection[str]]) -> Sequence[None]:
    for names in batch:
        texts.drop_strays(connection, names)
    return [None] * len(batch)
