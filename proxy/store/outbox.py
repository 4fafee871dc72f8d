"""The events that receivers of webhooks do not have yet."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from proxy.store.bell import Bell
from proxy.store.deliveries import Delivery, Event, Settled, Take, Told
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import webhooks

Tell = Callable[[Event, Mapping[str, Any]], Awaitable[None]]
"""Stores an event; see `Outbox.tell`."""


class Outbox:
    """Stores events for the receivers at `urls`. `news` rings when an event was stored through this process."""

    def __init__(self, database: OpenDatabase, urls: Sequence[str] = ()) -> None:
        self._database, self.urls, self.news = database, tuple(urls), Bell()

    async def tell(self, event: Event, data: Mapping[str, Any]) -> None:
        """Store an event that no change of a session brings about."""
        if self.urls:
            await self._database.write.submit(webhooks.tell, Told(event, data, self.urls))
            self.news.ring()

    async def take(self, wanted: Take) -> list[Delivery]:
        """Take deliveries that are due under a lease."""
        taken: list[Delivery] = await self._database.write.submit(webhooks.take, wanted)
        return taken

    async def settle(self, settled: Sequence[Settled]) -> None:
        """Store what became of attempts."""
        results = self._database.metrics.webhooks.by
        await self._database.write.submit(webhooks.settle, settled)
        for each in settled:
            results["delivered" if each.error is None else "dead" if each.due_at is None else "failed",] += 1

    async def resend(self, event_ids: Sequence[str] | None) -> int:
        """Send dead letters again, by the ids of their events (None: all); return their number."""
        count: int = await self._database.write.submit(webhooks.resend, event_ids)
        self.news.ring()
        return count

    async def next_due(self, url: str) -> float | None:
        """When the first delivery to a URL is due, in Unix seconds; None if none is left."""
        return await self._database.read(webhooks.next_due, url)

    async def listed(self, *, dead: bool, most: int) -> tuple[int, list[Delivery]]:
        """The number of dead letters, or of deliveries that wait, and the newest of them."""
        return await self._database.read(webhooks.listed, dead, most)
