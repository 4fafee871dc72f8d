"""Series of sessions under a name that no caller chose: `default`, then `default-1`, `default-2` ...

The name addresses the last session of the series. The next session begins only after its end, so every worker finds the
same session, also after a restart: an open session is always the last; after its end, the store is queried. A session
that a caller happened to create under such a name (`series` is not set) is skipped.
"""

from __future__ import annotations

from contextlib import suppress

from proxy.sessions.live_session import LiveSession
from proxy.sessions.named_sessions import NamedSessions
from proxy.sessions.registry import Registry
from proxy.store.session_starts import SessionStarts
from proxy.types import SessionRecord
from tokengrove.errors import SessionArchived, SessionNotFound, brief

# The most cached names. On an open server, each unknown key adds one.
_MAX_REMEMBERED = 4096


class SessionSeries:
    """Finds the last session of a series, and opens the next one after its end."""

    def __init__(self, registry: Registry, named: NamedSessions, starts: SessionStarts) -> None:
        self._registry, self._named, self._starts = registry, named, starts
        self._last: dict[str, str] = {}

    async def current(self, name: str, like: SessionRecord | None = None, label: str | None = None) -> LiveSession:
        """The open session of a series, created in memory if there is none. Raises TooManyRequests.

        `like`: what a new session begins with, options and keys; None: those of the server. `label`: of its episode.
        """
        last = await self._find(name)
        if last is None:
            last = await self._first(name)
        if last.closed:
            last = await self._after(name, last.id, like, label)
        self._remember(name, last)
        return last

    async def last(self, name: str) -> LiveSession:
        """The last session of a series in which a turn began; it may have ended. Raises SessionNotFound."""
        last = await self._find(name)
        if last is not None and last.follows is not None and not last.stored:
            last = await self._get(last.follows)  # only retries of its turns arrived since
        if last is None:
            raise SessionNotFound(
                f"there is no session {brief(name)}: no turn came with this key (or, like this request, with none) and "
                "without a session id; name the session in the path, as in /NAME/rl/set_reward"
            )
        return last

    async def with_turn(self, last: LiveSession, interaction_id: str) -> LiveSession:
        """The session that contains an interaction, in the series of `last`; `last` if there is none."""
        if interaction_id in last.cache.nodes or (last.record.series is None and last.episodes is None):
            return last
        found = await self._starts.find_in_series(last.name, interaction_id)
        return last if found is None else await self._registry.get(found)

    async def _find(self, name: str) -> LiveSession | None:
        held = self._last.get(name)
        session = None if held is None else await self._get(held)
        if session is not None and not session.closed and not _lost_predecessor(session):
            return session
        stored = await self._starts.last_of_series(name)
        if stored and (session is None or stored[0] != session.id):
            session = await self._get(stored[0])
        if session is not None:
            if _lost_predecessor(session):
                session.follows = next((each for each in stored if each != session.id), name)
            self._remember(name, session)
        return session

    async def _first(self, name: str) -> LiveSession:
        """The first session of a series, or the first after its archived ones."""
        try:
            return await self._named.get_or_create(name)
        except SessionArchived:
            return await self._after(name, name)

    async def _after(
        self, name: str, ended: str, like: SessionRecord | None = None, label: str | None = None
    ) -> LiveSession:
        """The first open session of the series after an ended session, given its id."""
        number = 1 if ended == name else int(ended.removeprefix(f"{name}-")) + 1
        follows, step = ended, 1
        while True:
            try:
                session = await self._named.get_or_create(f"{name}-{number}", name, like, label)
            except SessionArchived as error:  # there may be thousands
                number, step, follows = number + step, 2 * step, error.session_id
                continue
            if session.record.series != name:  # a task of that name may have thousands of sessions
                number, step = number + step, 2 * step
            elif session.closed:  # another worker opened it, and it has ended since
                number, follows = number + 1, session.id
            else:
                session.follows = follows
                return session

    async def _get(self, session_id: str) -> LiveSession | None:
        with suppress(SessionNotFound, SessionArchived):
            return await self._registry.get(session_id)
        return None

    def _remember(self, name: str, session: LiveSession) -> None:
        if len(self._last) >= _MAX_REMEMBERED:
            self._last.clear()
        self._last[name] = session.id


def _lost_predecessor(session: LiveSession) -> bool:
    """Whether a session was loaded again, so that its predecessor is unknown."""
    return session.record.series is not None and session.follows is None
