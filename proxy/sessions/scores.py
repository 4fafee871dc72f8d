"""The rewards of a session and the returns computed from them, kept equal in memory and in the store."""

from __future__ import annotations

from contextlib import suppress

from proxy.sessions.live_session import Changes, LiveSession
from proxy.sessions.registry import Registry
from proxy.store.answer import Noted
from proxy.store.session_changes import SessionChanges
from tokengrove.errors import SessionNotFound
from tokengrove.options.session import SessionStatus


class Scores:
    """Writes rewards and returns."""

    def __init__(self, registry: Registry, changes: SessionChanges) -> None:
        self._registry, self._changes = registry, changes

    async def set_rewards(self, session: LiveSession, changes: Changes, noted: Noted | None = None) -> bool:
        """Set raw rewards and marks. Return False, with nothing set, if another replica changed the session meanwhile.

        The session is then refreshed, and the caller decides on the changes again. `noted`: see `SessionChanges`.
        """
        done = await self._changes.set_rewards(session.id, changes, self._registry.seen(session), noted)
        if self._registry.shared:
            await self._registry.refresh(session)
        else:
            session.reward(changes)
        if done:
            await self.refresh_returns(session)
        return done

    async def add_late_turn(self, session: LiveSession) -> None:
        """Store the returns again after a turn that was committed while the session ended, or later."""
        async with session.lock:  # an end holds the lock until its commit
            with suppress(SessionNotFound):  # it was deleted meanwhile
                await self.refresh_returns(session)

    async def refresh_returns(self, session: LiveSession) -> None:
        """Compute and store the returns of an ended session again, after a reward or a late interaction."""
        while (record := session.record).status is not SessionStatus.ACTIVE:
            returns, seen = session.returns(), self._registry.seen(session)
            if await self._changes.set_returns(session.id, record.discount, record.credit, returns, seen):
                return
            await self._registry.refresh(session)
