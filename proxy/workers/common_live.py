"""The live view of a running server, over all its workers: samples of the last hour, and changes.

A worker that is dead or hangs is left out. A hung worker's samples return with it, and its counts are in the metrics.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from proxy.telemetry.history import History, Sample, added
from proxy.workers.peers import Peers

_ANSWER_S = 1.0
"""Seconds that a worker may take to answer. After that, the answers of the others are shown without it."""

Since = Callable[[Any], Any]
"""A function that returns the changes since a place that it returned before; None: the place to begin at."""
Places = Mapping[int, Any]
"""The place where a reader stopped in the changes of each worker, by worker number."""


class CommonLive:
    """Combines the data of this process with the data of the others. `peers`: None if there are no others."""

    def __init__(self, history: History, since: Since, peers: Peers | None) -> None:
        self._history, self._since, self._peers = history, since, peers
        self._number = 0 if peers is None else peers.number

    async def samples(self, slot: int) -> list[Sample]:
        """The summed samples of all processes that end at `slot` or later, oldest first."""
        others = [] if self._peers is None else await self._peers.ask_all("samples", slot, limit_s=_ANSWER_S)
        return added([self._history.since(slot), *others])

    async def changed(self, places: Places) -> dict[int, Any]:
        """The result of `since` for each process, by its number."""
        others = [] if self._peers is None else await self._peers.ask_all("changed", places, limit_s=_ANSWER_S)
        return dict([await self.own_changed(places), *others])

    async def own_samples(self, slot: int) -> list[Sample]:
        """The samples of this process that end at `slot` or later."""
        return self._history.since(slot)

    async def own_changed(self, places: Places) -> tuple[int, Any]:
        """The number of this process, and its result of `since`."""
        return self._number, self._since(places.get(self._number))
