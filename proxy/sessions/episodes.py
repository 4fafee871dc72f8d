"""Cuts the endless traffic at one address or key into episodes: sessions of one series, one after the other.

A cut closes the open session for new turns at once; the next turn opens the next session of the series, with the same
options and keys. The session ends, with the reason of the cut, when the turns that run in it have ended, so that an
end never comes before a turn that was begun. A process that dies in between leaves a session that has a successor, and
the next sweep ends it.
"""

from __future__ import annotations

import asyncio
import logging
import time

from proxy.sessions.endings import Endings
from proxy.sessions.live_session import LiveSession
from proxy.sessions.new_records import LABEL
from proxy.sessions.registry import Registry
from proxy.sessions.session_series import SessionSeries
from proxy.store.session_changes import SessionChanges
from tokengrove.errors import InvalidRequest, ProxyError, SessionArchived, SessionClosed, SessionNotFound, brief
from tokengrove.options.session import Outcome, SessionStatus
from tokengrove.options.start import EpisodeOptions

logger = logging.getLogger(__name__)

HEADER = "x-tokengrove-episode"

_SWEEP_S = 15.0
_SETTLE_S = 0.05
_PAGE = 1000


class EpisodeOver(SessionClosed):
    """A turn begins another episode, so the session does not take it. `why`: the reason of the cut."""

    def __init__(self, session_id: str, why: str) -> None:
        super().__init__(f"session {brief(session_id)} ends here: {why}; send the request again")
        self.why = why


class Episodes:
    """Finds the open session of a series, and cuts it when it is due."""

    def __init__(self, registry: Registry, series: SessionSeries, endings: Endings, changes: SessionChanges) -> None:
        self._registry, self._series, self._endings, self._changes = registry, series, endings, changes
        self._sealing: dict[str, asyncio.Task[None]] = {}

    async def current(self, session: LiveSession, label: str | None = None) -> LiveSession:
        """The open session of the series of `session`, which has episodes: `session`, or a later one.

        `label`: the episode that the request names. Raises TooManyRequests if no more sessions may start.
        """
        while True:
            if session.closed:
                session = await self._series.current(session.name, like=session.record, label=label)
            rules = session.episodes
            if rules is None or (why := await self._due(session, rules, label)) is None:
                return session
            self.cut(session, why)

    def cut(self, session: LiveSession, why: str) -> None:
        """Close a session for new turns; it ends when those that run have ended."""
        if session.closed:
            return
        session.ending = True
        task = self._sealing[session.id] = asyncio.create_task(self._seal(session, why))
        task.add_done_callback(lambda _: self._sealing.pop(session.id, None))

    async def sweep(self) -> None:
        """End the episodes that are idle, and those that a process that has died had cut."""
        after = -1
        while page := await self._changes.find_episodes(after, _PAGE):
            for each in page:
                after = each.number
                late = each.idle_s is not None and each.updated_at < time.time() - each.idle_s
                if (late or each.followed) and each.session_id not in self._sealing:
                    await self._check(each.session_id, followed=each.followed)

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            try:
                await self.sweep()
            except ProxyError as error:
                logger.warning("episodes could not be ended: %(why)s", {"why": error.message})

    async def close(self) -> None:
        """End the cut sessions whose turns have ended. The next start ends the others."""
        if self._sealing:
            _, rest = await asyncio.wait([*self._sealing.values()], timeout=1.0)
            for task in rest:
                task.cancel()
            await asyncio.gather(*rest, return_exceptions=True)

    async def _check(self, session_id: str, *, followed: bool) -> None:
        try:
            session = await self._registry.get(session_id)
        except (SessionNotFound, SessionArchived):
            return
        if session.episodes is None or session.closed:
            return
        why = "followed by another episode" if followed else await self._idle(session, session.episodes)
        if why is not None:
            self.cut(session, why)

    async def _due(self, session: LiveSession, rules: EpisodeOptions, label: str | None) -> str | None:
        """Why a session takes no further turn; None if it does."""
        if label is not None and not _adopt(session, label):
            return f"episode {brief(label)} began"
        if rules.max_turns is not None and session.turns_taken >= rules.max_turns:
            return f"{rules.max_turns} turns"
        return await self._idle(session, rules)

    async def _idle(self, session: LiveSession, rules: EpisodeOptions) -> str | None:
        if rules.idle_s is None or not session.turned_at or session.running:
            return None
        if time.time() - session.turned_at < rules.idle_s or await self._registry.count_begun(session.id):
            return None
        return f"idle for {rules.idle_s:g} s"

    async def _seal(self, session: LiveSession, why: str) -> None:
        try:
            while await self._registry.count_begun(session.id):  # noqa: ASYNC110 (of any process)
                await asyncio.sleep(_SETTLE_S)
            async with session.lock:
                await self._endings.end(
                    session, status=SessionStatus.ENDED, outcome=Outcome.FINISHED, exit_reason=f"cut: {why}"
                )
            logger.info("episode ended", {"session": session.id, **session.labels, "why": why})
        except ProxyError as error:  # the sweep tries again
            session.ending = False
            logger.warning(
                "an episode could not be ended: %(why)s",
                {"why": error.message, "session": session.id, **session.labels},
            )


def _adopt(session: LiveSession, label: str) -> bool:
    """Whether a session is the episode of this name. One without a turn becomes it."""
    known = session.record.metadata.get(LABEL)
    if known is None and not session.turns_taken:
        session.record.metadata = {**session.record.metadata, LABEL: label}
        return True
    return known == label


def check_label(label: str | None, session: LiveSession | None) -> None:
    """Raise InvalidRequest for a label of an episode, without a session or if the session is not cut into some."""
    if label is not None and session is None:
        raise InvalidRequest(f"{HEADER} has no effect without a session: name one in the path", param=HEADER)
    if label is not None and session is not None and session.episodes is None:
        raise InvalidRequest(
            f"{HEADER} has no effect here: the session was not started with 'episodes', and the server has no "
            "--episode-* setting",
            param=HEADER,
        )
