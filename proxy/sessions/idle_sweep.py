"""Idle sessions: they leave memory after ten minutes, and with `--session-idle-s` they end as expired."""

from __future__ import annotations

import asyncio
import logging
import time

from proxy.errors import ProxyError
from proxy.sessions.endings import Endings
from proxy.sessions.registry import Registry
from proxy.store.session_changes import SessionChanges
from proxy.types import SessionStatus

logger = logging.getLogger(__name__)

# A session that is not used for this long is loaded from the store when it is needed again.
_FORGET_S = 600.0
_SWEEP_S = 60.0
_PAGE = 1000


class IdleSweep:
    """Looks for idle sessions again and again. `idle_s`: after how long a session expires; None: never."""

    def __init__(self, registry: Registry, changes: SessionChanges, endings: Endings, idle_s: float | None) -> None:
        self._registry, self._changes, self._endings, self._idle_s = registry, changes, endings, idle_s

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(_SWEEP_S if self._idle_s is None else min(_SWEEP_S, self._idle_s / 4))
            self._registry.forget_idle(_FORGET_S)
            if self._idle_s is not None:
                try:
                    await self.expire_idle(self._idle_s)
                except ProxyError as problem:
                    logger.warning("idle sessions could not be sealed: %s", problem.message)

    async def expire_idle(self, idle_s: float) -> None:
        """End sessions as expired that no replica used for `idle_s` seconds; their data stays."""
        before = time.time() - idle_s
        while names := await self._changes.find_idle(before, _PAGE):
            expired = [name for name in names if await self._expire(name, idle_s, before)]
            if len(expired) < len(names) or len(names) < _PAGE:
                return  # the remaining ones are in use; the next sweep looks again

    async def _expire(self, session_id: str, idle_s: float, before: float) -> bool:
        live = self._registry.find(session_id)
        if live is not None and (live.running or live.waiting or live.used_at > time.monotonic() - idle_s):
            return False
        session = await self._registry.get(session_id)
        async with session.lock:
            last = max((i.completed_at or 0.0 for i in session.complete()), default=0.0)
            if session.running or max(last, session.record.updated_at) > before:
                return False
            await self._endings.end(session, status=SessionStatus.EXPIRED, exit_reason=f"unused for {idle_s:g} s")
        return True
