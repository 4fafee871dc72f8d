"""The events for listeners. Each event is made once for all listeners, and none is made without listeners.

A listener has room for the newest statistics and a few notes of changed sessions. A listener that does not read delays
no other and holds little memory: a single note replaces the notes that it missed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

from proxy.api.statistics import MINUTE_S, Statistics
from proxy.protocols.sse import KEEPALIVE, event
from proxy.workers.common_live import CommonLive
from tokengrove.errors import ProxyError, TooManyRequests

logger = logging.getLogger(__name__)

MOST_LISTENERS = 64
"""The most listeners of one process. Each costs a connection and a few kilobytes."""
KEEPALIVE_S = 15.0
_TICK_S = 1.0
_STATISTICS_TICKS = 2
_SETTLE_S = 0.1
"""The delay between a change and its event, so that database writes queued with the change can be read."""
_MOST_NOTES = 8


class Kind(StrEnum):
    """The events, by name."""

    STATISTICS = "statistics"
    SESSIONS = "sessions"


ALL_CHANGED = event(Kind.SESSIONS, {"changed": [], "all": True})


class Listener:
    """A listener to events of some `kinds`."""

    def __init__(self, kinds: frozenset[Kind]) -> None:
        self.kinds = kinds
        self._statistics: bytes | None = None
        self._notes: deque[bytes] = deque()
        self._told = asyncio.Event()

    def tell(self, kind: Kind, what: bytes) -> None:
        """Keep an event until it is read. `what`: the encoded event, the same object for all listeners."""
        if kind not in self.kinds:
            return
        if kind is Kind.STATISTICS:
            self._statistics = what
        elif len(self._notes) < _MOST_NOTES:
            self._notes.append(what)
        else:
            self._notes.clear()
            self._notes.append(ALL_CHANGED)
        self._told.set()

    async def next(self) -> bytes:
        """The events since the last call. Waits for the first; returns a keep-alive if none comes in time."""
        try:
            async with asyncio.timeout(KEEPALIVE_S):
                await self._told.wait()
        except TimeoutError:
            return KEEPALIVE
        self._told.clear()
        found = b"".join([*([self._statistics] if self._statistics else ()), *self._notes])
        self._statistics = None
        self._notes.clear()
        return found


class Feed:
    """Sends events to all listeners of one process. Use it on one event loop."""

    def __init__(self, statistics: Statistics, live: CommonLive) -> None:
        self._statistics, self._live = statistics, live
        self._listeners: set[Listener] = set()
        self._places: dict[int, Any] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def listening(self, kinds: frozenset[Kind]) -> Iterator[Listener]:
        """A listener for the duration of the block. Raises TooManyRequests if there are MOST_LISTENERS."""
        if len(self._listeners) >= MOST_LISTENERS:
            raise TooManyRequests(
                f"{MOST_LISTENERS} clients listen to /rl/events already, and no more may; close one, or ask "
                "GET /rl/statistics now and then",
                retry_after_s=10.0,
            )
        listener = Listener(kinds)
        self._listeners.add(listener)
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield listener
        finally:
            self._listeners.discard(listener)
            if not self._listeners and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        """Send events at each tick until cancelled."""
        await self._try(self._look_for_changes)  # sets the place to begin at
        ticks = 0
        while True:
            if ticks % _STATISTICS_TICKS == 0:
                await self._try(self._tell_statistics)
            await asyncio.sleep(_TICK_S)
            await self._try(self._tell_changes)
            ticks += 1

    async def _try(self, step: Callable[[], Awaitable[Any]]) -> None:
        """Run a step and log its errors, so that the next tick runs in any case."""
        try:
            await step()
        except ProxyError as error:
            logger.warning("the page's listeners could not be told: %s", error.message)
        except Exception:
            logger.exception("the page's listeners could not be told")

    async def _tell_statistics(self) -> None:
        if any(Kind.STATISTICS in listener.kinds for listener in self._listeners):
            self._tell(Kind.STATISTICS, event(Kind.STATISTICS, await self._statistics.read(MINUTE_S)))

    async def _tell_changes(self) -> None:
        ids, everything = await self._look_for_changes()
        if ids or everything:
            await asyncio.sleep(_SETTLE_S)
            self._tell(Kind.SESSIONS, event(Kind.SESSIONS, {"changed": ids, "all": everything}))

    async def _look_for_changes(self) -> tuple[list[str], bool]:
        """The sessions that changed on any worker since the last call, and whether some may be missing."""
        found = await self._live.changed(self._places)
        missing = bool(self._places) and found.keys() != self._places.keys()
        self._places = {worker: changed.place for worker, changed in found.items()}
        ids = dict.fromkeys(name for changed in found.values() for name in changed.ids)
        return list(ids), missing or any(changed.all for changed in found.values())

    def _tell(self, kind: Kind, what: bytes) -> None:
        for listener in self._listeners:
            listener.tell(kind, what)
