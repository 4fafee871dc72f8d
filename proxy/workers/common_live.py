"""What is shown of a running server while somebody watches it, of all its workers: the last hour, and what changed.

A worker that is dead or hangs is left out: its samples come back with it, and what it counted is in the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxy.telemetry.history import History, Sample, added
from proxy.workers.peers import Peers

_ANSWER_S = 1.0
"""How long a worker may take: what the others say is shown without it."""

Since = Callable[[Any], Any]
"""Returns what changed since a place, which its reader got of it before; None: the place to begin at."""
Places = Mapping[int, Any]
"""Where a reader stopped in the changes of each worker, by its number."""


class CommonLive:
    """Adds what this process knows to what the others do. `peers`: None if there are no others."""

    def __init__(self, history: History, since: Since, peers: Peers | None) -> None:
        self._history, self._since, self._peers = history, since, peers
        self._number = 0 if peers is None else peers.number

    async def samples(self, slot: int) -> list[Sample]:
        """The samples of all processes that end at `slot` or later, added, oldest first."""
        others = [] if self._peers is None else await self._peers.ask_all("samples", slot, limit_s=_ANSWER_S)
        return added([self._history.since(slot), *others])

    async def changed(self, places: Places) -> dict[int, Any]:
        """What `since` says of each process, by its number."""
        others = [] if self._peers is None else await self._peers.ask_all("changed", places, limit_s=_ANSWER_S)
        return dict([await self.own_changed(places), *others])

    async def own_samples(self, slot: int) -> list[Sample]:
        """The samples of this process."""
        return self._history.since(slot)

    async def own_changed(self, places: Places) -> tuple[int, Any]:
        """The number of this process, and what `since` says of it."""
        return self._number, self._since(places.get(self._number))
