"""The metrics of all workers. Counts that were shown stay in the sums after their worker has died, so they never fall.

For this, a worker writes its counts to a file on each request for them, before it returns them.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from proxy.telemetry.metrics import Metrics, Snapshot
from proxy.workers.peers import Peers

_ANSWER_S = 3.0
"""Seconds that a worker may take to return its metrics. The metrics of the others show that it hangs."""


class CommonMetrics:
    """Adds `metrics` of this worker to the metrics of the others. `folder`: a folder that all workers share."""

    def __init__(self, metrics: Metrics, peers: Peers, folder: Path) -> None:
        self._metrics, self._peers, self._folder = metrics, peers, folder
        self._own = f"{peers.number}-{os.getpid()}.counts"

    async def count(self) -> tuple[str, Snapshot]:
        """The name of the file with the counts of this worker, and the counts."""
        new = self._folder / f"{self._own}.new"
        numbers = await self._metrics.now()
        new.write_bytes(pickle.dumps(numbers))
        new.rename(self._folder / self._own)
        return self._own, numbers

    async def total(self) -> Snapshot:
        """The sums over all workers, including workers that have died or do not answer."""
        alive = dict([await self.count(), *await self._peers.ask_all("count", limit_s=_ANSWER_S)])
        gone = [file for file in self._folder.glob("*.counts") if file.name not in alive]
        return self._metrics.total(list(alive.values()), [pickle.loads(file.read_bytes()) for file in gone])
