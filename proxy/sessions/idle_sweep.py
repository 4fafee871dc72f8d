"""Expires idle sessions (`--session-idle-s`)."""

from __future__ import annotations

import asyncio
import logging
import time

from proxy.sessions.endings import Endings
from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry
from proxy.store.session_changes import SessionChanges
from tokengrove.errors import ProxyError
from tokengrove.options.session import SessionStatus

logger = logging.getLogger(__name__)

_SWEEP_S = 60.0
_PAGE = 1000


class IdleSweep:
    """Searches for idle sessions periodically."""

    def __init__(self, registry: Registry, changes: SessionChanges, endings: Endings) -> None:
        self._registry, self._changes, self._endings = registry, changes, endings

    async def run(self, idle_s: float) -> None:
        """Sweep until cancelled. `idle_s`: seconds without use after which a session expires."""
        while True:
            await asyncio.sleep(min(_SWEEP_S, idle_s / 4))
            try:
                await self.expire_idle(idle_s)
            except ProxyError as problem:
                logger.warning("idle sessions could not be sealed: %(reason)s", {"reason": problem.message})

    async def expire_idle(self, idle_s: float) -> None:
        """Expire sessions that no replica has used for `idle_s` seconds. Their data stays."""
        before = time.time() - idle_s
        while names := await self._changes.find_idle(before, _PAGE):
            expired = [name for name in names if await self._expire(name, idle_s, before)]
            if len(expired) < len(names) or len(names) < _PAGE:
                return  # the remaining ones are in use; the next sweep checks them

    async def _expire(self, session_id: str, idle_s: float, before: float) -> bool:
        live = self._registry.find(session_id)
        if live is not None and (live.running or live.waiting or live.used_at > time.monotonic() - idle_s):
            return False
        session, why = await self._registry.get(session_id), f"unused for {idle_s:g} s"
        async with session.lock:
            if not await self._endings.end(
                session, status=SessionStatus.EXPIRED, exit_reason=why, in_use=lambda: _in_use(session, before)
            ):
                return False
        logger.info(
            "session expired",
            {"session": session.id, **session.labels, "turns": len(session.complete()), "idle_s": idle_s},
        )
        return True


def _in_use(session: LiveSession, before: float) -> bool:
    last = max((i.completed_at or 0.0 for i in session.complete()), default=0.0)
    return session.running > 0 or session.waiting > 0 or max(last, session.record.updated_at) > before
