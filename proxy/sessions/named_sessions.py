"""Sessions that a request creates by naming them in its path or header. The row is written with the first turn."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from functools import partial

from proxy.sessions.live_session import LiveSession
from proxy.sessions.new_records import NewRecords
from proxy.sessions.registry import Registry
from proxy.sessions.replica import NOTHING_SEEN
from proxy.sessions.start_limits import StartLimits
from proxy.store.news import first_seen
from proxy.store.refusals import too_many_live, too_stale
from proxy.store.session_starts import SessionStarts
from proxy.trajectory.cache import InteractionCache
from proxy.types import SessionRecord
from tokengrove.errors import InvalidRequest, SessionNotFound


class NamedSessions:
    """Creates sessions by name. Only an open server lets callers do so (see `access`).

    `have_episodes`: the traffic of each of them is cut into episodes.
    """

    def __init__(self, registry: Registry, starts: SessionStarts, limits: StartLimits, records: NewRecords) -> None:
        self._registry, self._starts, self._limits, self._records = registry, starts, limits, records
        self.have_episodes = bool(records.of_named)

    async def get_or_create(
        self,
        session_id: str,
        series: str | None = None,
        like: SessionRecord | None = None,
        label: str | None = None,
    ) -> LiveSession:
        """Return the session, created in memory if it does not exist. `session_id` must be valid.

        `series`: the series of a new session (see `session_series`), also its task id. `like`: the record of another
        session of it, whose options and keys it begins with. `label`: of its episode. Raises TooManyRequests.
        """
        if not self._registry.excludes(session_id):
            with suppress(SessionNotFound):
                return await self._registry.get(session_id)
        if like is None or like.turn_options.get("episodes") is None:
            record = self._records.build(session_id, series or session_id, self._records.of_named)
        else:
            record = self._records.build_next(session_id, like, label)
        record.series = series
        if self._limits.any:
            await self._check_room()
        new = LiveSession(record, InteractionCache(), stored=False, confirmed=False, seen=NOTHING_SEEN)
        return self._registry.add(new)

    def ensure_stored(self, session: LiveSession) -> None:
        """Queue the row of a session that has none yet. Its turns follow in the same queue, so nothing waits for it."""
        if not session.stored:
            creation = self._starts.create_session(session.record, urgent=False)
            session.stored = True
            session.seen = first_seen(session.record.created_at)
            creation.add_done_callback(partial(self._created, session))

    async def _check_room(self) -> None:
        """Raise TooManyRequests if no more sessions may start."""
        unconfirmed = self._registry.count_unconfirmed
        if (taken := self._limits.max_taken) is not None and await self._starts.count_taken() + unconfirmed() >= taken:
            raise too_stale(taken)
        if (live := self._limits.max_live) is not None and await self._starts.count_live() + unconfirmed() >= live:
            raise too_many_live(live)

    def _created(self, session: LiveSession, creation: asyncio.Future[None]) -> None:
        error = None if creation.cancelled() else creation.exception()
        if error is None:
            session.confirmed = True
        elif self._registry.shared and isinstance(error, InvalidRequest):
            session.seen = NOTHING_SEEN  # another replica created the row first: load it
        else:
            self._registry.discard(session)  # the next request tries again
