"""Waiting for the end of sessions, on this replica or another one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry
from proxy.store.replica_news import ReplicaNews
from tokengrove.errors import SessionNotFound, StoreUnavailable

logger = logging.getLogger(__name__)

# The interval at which ends on other replicas are polled, and the most sessions in one query.
_WATCH_S, _WATCHED = 0.5, 1000


class EndWaiter:
    """Waits for the end of sessions. Ends on this replica wake it at once; ends on other replicas are polled."""

    def __init__(self, registry: Registry, news: ReplicaNews) -> None:
        self._registry, self._news = registry, news

    async def wait_ended(self, session_ids: Sequence[str], wait_s: float) -> None:
        """Wait until all of these sessions have ended, for `wait_s` seconds at most. Raises SessionNotFound."""
        sessions = [await self._registry.get(session_id) for session_id in session_ids]
        for session in sessions:
            session.waiting += 1
        watch = asyncio.create_task(self._watch(sessions)) if self._registry.shared else None
        try:
            async with asyncio.timeout(wait_s):
                for session in sessions:
                    await session.ended.wait()
        except TimeoutError:
            return
        finally:
            for session in sessions:
                session.waiting -= 1
            if watch is not None:
                watch.cancel()

    async def _watch(self, sessions: Sequence[LiveSession]) -> None:
        """Refresh sessions that ended on other replicas, until cancelled."""
        while left := [session for session in sessions if not session.ended.is_set()][:_WATCHED]:
            try:
                live = await self._news.live_sessions([session.id for session in left])
                for session in left:
                    if session.id not in live and session.confirmed:
                        await self._registry.refresh(session)
            except SessionNotFound:
                pass  # it was pruned elsewhere; its `ended` is set by now
            except StoreUnavailable as problem:
                logger.warning("cannot see whether sessions ended on other replicas: %s", problem.message)
            await asyncio.sleep(_WATCH_S)
