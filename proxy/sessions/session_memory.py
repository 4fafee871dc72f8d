"""Drops idle sessions from memory. Sessions stay while they are in use, and afterwards while there is room.

While turns run, the most recently used sessions stay, up to a number of bytes. When the server is quiet, nearly all
sessions are dropped, and the process returns the freed memory to the system. The store has everything, so a session is
loaded again when it is used.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from collections.abc import Callable
from operator import attrgetter

from proxy.resources.garbage import collect_everything
from proxy.resources.memory import resident_bytes, return_freed_memory
from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry

logger = logging.getLogger(__name__)

# A session that is unused for this long is dropped in any case.
_FORGET_S = 600.0
_SWEEP_S = 5.0
# A session that was used within this time stays, and the server is not quiet.
_QUIET_S = 10.0
# The bytes of sessions that stay in memory on a quiet server, for agents whose tools take long.
_KEPT_WHEN_QUIET = 8 * 1024 * 1024
# Freed memory is returned if the process has grown by this many bytes since the last time.
_GROWN = 4 * 1024 * 1024
# Frozen objects are collected if a quiet server has this many bytes more than before it began, or the last time.
_LEFT = 64 * 1024 * 1024
# Sessions that are checked, and bytes of sessions that are freed, before yielding to the event loop: a few ms.
_AT_ONCE = 1000
_FREED_AT_ONCE = 4 * 1024 * 1024

_used_at = attrgetter("used_at")


class SessionMemory:
    """Drops idle sessions. `most_bytes`: the most bytes of sessions in memory while turns run (`LiveSession.size`)."""

    def __init__(self, registry: Registry, most_bytes: int) -> None:
        self._registry, self._most_bytes = registry, most_bytes
        self._resident = 0
        self._settled = resident_bytes()

    async def run(self, empty_caches: Callable[[], None]) -> None:
        """Sweep until cancelled. `empty_caches` drops the other cached data of the latest turns."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            if await self.sweep() and resident_bytes() > self._resident + _GROWN:
                await asyncio.to_thread(empty_caches)
                gc.collect()  # fast, because few objects are left
                await asyncio.to_thread(return_freed_memory)
                self._resident = resident_bytes()
                if self._resident > self._settled + _LEFT:
                    await self._collect_everything()

    async def _collect_everything(self) -> None:
        """Free the cycles among frozen objects. Nobody waits for it: the server is quiet."""
        collect_everything()
        await asyncio.to_thread(return_freed_memory)
        self._resident = self._settled = resident_bytes()

    async def sweep(self) -> bool:
        """Drop the sessions that exceed the limits. Return True if the server is quiet."""
        sessions = self._registry.sessions()
        recently = time.monotonic() - _QUIET_S
        held, quiet = 0, True
        for start in range(0, len(sessions), _AT_ONCE):
            for session in sessions[start : start + _AT_ONCE]:
                held += session.size
                quiet = quiet and session.used_at < recently and not session.running
            await asyncio.sleep(0)
        await self._forget(sessions, held - (min(_KEPT_WHEN_QUIET, self._most_bytes) if quiet else self._most_bytes))
        self._registry.forget_gone()
        return quiet

    async def _forget(self, sessions: list[LiveSession], excess: int) -> None:
        """Drop idle sessions, least recently used first, until `excess` bytes are freed. Empties the list.

        A session is freed when the list lets it go, so the event loop gets its turn between some of them.
        """
        sessions.sort(key=_used_at, reverse=True)
        now, forgotten, freed = time.monotonic(), 0, 0
        while sessions:
            session = sessions.pop()
            unused_s = now - session.used_at
            if unused_s < _FORGET_S and (excess <= 0 or unused_s < _QUIET_S):
                break
            if not (session.running or session.waiting):
                self._registry.forget(session)
                excess -= session.size
                freed += session.size
                forgotten += 1
            if freed >= _FREED_AT_ONCE:
                freed = 0
                del session
                await asyncio.sleep(0)
        if forgotten:
            logger.debug("sessions left memory", {"sessions": forgotten, "left": len(self._registry.sessions())})
