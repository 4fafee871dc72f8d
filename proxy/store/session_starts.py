"""New sessions, and the counts that bound how many may start."""

from __future__ import annotations

import asyncio
from functools import partial

from proxy.store.answer import Noted
from proxy.store.known_sessions import KnownSessions
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import archived, reads, rows, starts, writes
from proxy.store.sql.starts import Start
from proxy.store.writer import Phase
from proxy.types import SessionRecord


class SessionStarts:
    """Creates session rows; every limit is checked in the transaction that creates the row."""

    def __init__(self, database: OpenDatabase, known: KnownSessions) -> None:
        self._database, self._known, self._metrics = database, known, database.metrics

    def create_session(
        self,
        record: SessionRecord,
        *,
        chosen_key: bool = False,
        max_live: int | None = None,
        max_taken: int | None = None,
        urgent: bool = True,
        noted: Noted | None = None,
    ) -> asyncio.Future[None]:
        """Queue the row of a new session at once; the future is resolved after its commit.

        The future raises InvalidRequest (param session_id) if the id exists, KeyInUse if a `chosen_key` belongs to a
        live session, TooManyRequests if `max_live` sessions are live, if `max_taken` are live or ended without failing,
        or if no granted start is left for a session that takes capacity. `urgent`: see Writer.submit;
        `noted`: see OpenDatabase.submit_noted.
        """
        self._known.add(record.session_id)
        start = Start(rows.session_row(record), chosen_key, max_live, max_taken)
        free = not (chosen_key or record.took_capacity) and max_live is None and max_taken is None
        if free and noted is None:
            creation = self._database.write.submit(writes.create_freely, start, Phase.SESSIONS, urgent=urgent)
        else:  # in order: an earlier queued end of another session may free the key or the place
            creation = self._database.submit_noted(writes.create_sessions, start, noted, urgent=urgent)
        creation.add_done_callback(partial(self._created, record.session_id))
        return creation

    async def is_archived(self, session_id: str) -> bool:
        """Whether an archived session has this id."""
        if self._known.exclude(session_id):
            return False
        return bool(await self._database.read(archived.find_archived, [session_id]))

    async def grant_capacity(self, number: int, noted: Noted | None = None) -> int:
        """Allow `number` more sessions to start, or fewer if it is negative. Return the number that may start now."""
        left: int = await self._database.submit_noted(starts.grant, number, noted)
        return left

    async def last_of_series(self, name: str) -> list[str]:
        """The ids of the last session of a series and of the one before it, if they are stored."""
        return await self._database.read(reads.last_of_series, name)

    async def find_in_series(self, name: str, interaction_id: str) -> str | None:
        """The id of the session in a series that has a stored interaction; None if there is none."""
        return await self._database.read(reads.find_in_series, name, interaction_id)

    async def count_live(self) -> int:
        """The number of sessions that have not ended."""
        return await self._database.read(starts.count_live)

    async def count_taken(self) -> int:
        """The number of sessions that are live or ended without failing."""
        return await self._database.read(starts.count_taken)

    async def count_sessions(self, task_id: str) -> int:
        """The number of sessions of a task. The search for a free `<task_id>-<n>` begins there."""
        return await self._database.read(reads.count_sessions, task_id)

    def _created(self, session_id: str, creation: asyncio.Future[None]) -> None:
        if not creation.cancelled() and creation.exception() is None:
            self._metrics.started.by[()] += 1
            if self._database.changed.watched:
                self._database.changed.note(session_id)
