"""Durable notes of the engine servers that this server has paused, so that a crash leaves none of them paused forever.

A note is a lease, written before the pause and renewed while it lasts. A note that is no longer renewed was left by a
server that ended during its pause: the next server of the same name finds it at its start, and so does every other
server on a shared database. An engine server without a note is never resumed, since another client has paused it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Protocol, runtime_checkable

from proxy.engine.interface import PauseMode
from proxy.types import PauseNote
from tokengrove.errors import ProxyError

logger = logging.getLogger(__name__)

LEASE_S = 30.0
"""Seconds after which a note that is not renewed expires. The clocks of all hosts must agree within this time."""

_RENEW_S = 10.0
_DOUBT_S = 16.0
"""Seconds for which a running server must have seen a note as expired. After an outage of the database, the owner of
the note, which may be in the middle of a weight update, renews it within `_RENEW_S` plus `_WRITE_S`."""

_WRITE_S = 5.0
"""Limit in seconds for writes to the database: a pause does not wait for an unavailable database."""


@runtime_checkable
class NotedEngine(Protocol):
    """Additional interface of an engine over servers that outlive this process, and stay paused if it dies."""

    pauses: Pauses

    @property
    def left_over(self) -> tuple[PauseMode, frozenset[str]] | None:
        """After `start`: the pause of an earlier server that is still in force, and the memory that it released."""


class PauseTable(Protocol):
    """The storage of notes. Every method may raise StoreUnavailable."""

    @property
    def shared(self) -> bool:
        """True if other servers may write notes to it."""

    async def note(self, notes: Collection[PauseNote]) -> None:
        """Write notes, replacing notes of the same server and owner."""

    async def forget(self, notes: Collection[PauseNote]) -> None:
        """Delete notes, unless they have been renewed."""

    async def noted(self) -> list[PauseNote]:
        """All notes."""


class Pauses:
    """The notes of this server. Without a `table` there are none.

    `owner`: the name of this server, unique and the same at every start. `leads`: False for a worker that does not
    administer the engine; it only reads notes. `left`: notes of servers that ended during their pause, by the URL of
    the engine server, as of the last `look`.
    """

    def __init__(
        self,
        table: PauseTable | None = None,
        owner: str = "",
        *,
        leads: bool = True,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._table, self._owner, self.leads, self._clock = table, owner, leads, clock
        self._held: dict[str, PauseNote] = {}
        self._expired: dict[PauseNote, float] = {}
        self.left: dict[str, PauseNote] = {}

    @property
    def held(self) -> Collection[str]:
        """The URLs of the engine servers that this server has noted."""
        return self._held.keys()

    async def begin(self, urls: Collection[str], mode: PauseMode, released: Collection[str] = ()) -> None:
        """Note that servers are about to be paused, with the kinds of memory that they are about to release.

        A failure of the database is only logged, since it must not fail a weight update.
        """
        if self._table is None or not self.leads:
            return
        until = self._clock() + LEASE_S
        for url in urls:
            self.left.pop(url, None)
        self._held |= {url: PauseNote(url, self._owner, mode.value, ",".join(sorted(released)), until) for url in urls}
        await self._write(self._table.note([self._held[url] for url in urls]), "noted")

    async def end(self, urls: Collection[str]) -> None:
        """Note that servers have been resumed."""
        if self._table is not None and (notes := [self._held.pop(url) for url in urls if url in self._held]):
            await self._write(self._table.forget(notes), "forgotten")

    def leave(self, url: str) -> None:
        """Note that this server gives up an engine server that may still be paused."""
        if (note := self._held.pop(url, None)) is not None:
            self.left[url] = note

    async def look(self, doubt_s: float = 0.0) -> None:
        """Find the notes of servers that ended during their pause.

        The leases of other servers must have been seen as expired `doubt_s` seconds ago, so that an owner that was only
        cut off from the database had time to renew them.
        """
        if self._table is None:
            return
        try:
            notes = await self._table.noted()
        except ProxyError as error:
            logger.warning(
                "it cannot be seen which engine servers were left paused: %(reason)s", {"reason": error.message}
            )
            return
        now = self._clock()
        self._expired = {note: self._expired.get(note, now) for note in notes if note.until < now}
        self.left = {note.url: note for note in notes if self._is_left(note, now - doubt_s)}

    async def continued(self, url: str) -> None:
        """Note that a server that was left paused has been resumed."""
        if self._table is not None and (note := self.left.pop(url, None)) is not None:
            await self._write(self._table.forget([note]), "forgotten")

    def take_over(self) -> None:
        """Make the notes in `left` this server's own."""
        if self.leads:
            self._held |= {url: note._replace(owner=self._owner) for url, note in self.left.items()}
        self.left = {}

    async def run(self, found: Callable[[], Awaitable[None]]) -> None:
        """Renew the notes until cancelled. While there are none, call `found` if other servers have left notes."""
        while self._table is not None and self._table.shared and self.leads:
            await asyncio.sleep(_RENEW_S)
            if self._held:
                until = self._clock() + LEASE_S
                self._held = {url: note._replace(until=until) for url, note in self._held.items()}
                await self._write(self._table.note(list(self._held.values())), "noted")
            else:
                await self.look(_DOUBT_S)
                if self.left:
                    await found()

    def _is_left(self, note: PauseNote, seen_by: float) -> bool:
        assert self._table is not None
        if note.owner == self._owner:
            return note.url not in self._held
        return not self._table.shared or self._expired.get(note, math.inf) <= seen_by

    async def _write(self, writing: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(_WRITE_S):
                await writing
        except (ProxyError, TimeoutError) as error:
            reason = error.message if isinstance(error, ProxyError) else f"no answer within {_WRITE_S:g} s"
            logger.warning(
                "the pause of the engine servers cannot be %(what)s in the database: %(reason)s",
                {"what": what, "reason": reason},
            )
