"""`DELETE /rl/sessions/{session}`: permanently deletes a session with its turns, rewards, keys and claims."""

from __future__ import annotations

from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry
from proxy.store.answer import Noted
from proxy.store.session_changes import SessionChanges


class Deletion:
    """Deletes sessions from the store and from memory."""

    def __init__(self, registry: Registry, changes: SessionChanges) -> None:
        self._registry, self._changes = registry, changes

    async def delete(self, session: LiveSession, noted: Noted | None = None) -> int:
        """Delete a session; return the number of its turns. Raises SessionNotFound.

        The session takes no turns meanwhile. Running turns are left to the caller: they can no longer be stored.
        """
        async with session.lock:
            session.ending = True
            try:
                turns = await self._changes.delete_session(session.id, noted)
            finally:
                session.ending = False
            self._registry.forget_deleted(session)
        return turns
