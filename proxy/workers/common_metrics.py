"""The metrics of all workers. What has been shown once stays in the sums after its worker has died: counts never fall.

For that, a worker writes its counts to a file whenever they are asked for, before it gives them.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path

from proxy.telemetry.metrics import Metrics
from proxy.workers.peers import Peers

_ANSWER_S = 3.0
"""How long the metrics of one worker may take: those of the others show that it hangs."""


class CommonMetrics:
    """Adds `metrics`, of this worker, to those of the others. `folder`: common to all."""

    def __init__(self, metrics: Metrics, peers: Peers, folder: Path) -> None:
        self._metrics, self._peers, self._folder = metrics, peers, folder
        self._own = f"{peers.number}-{os.getpid()}.counts"

    async def count(self) -> tuple[str, Metrics]:
        """The counts of this worker, and the name of the file that keeps them."""
        new = self._folder / f"{self._own}.new"
        new.write_bytes(pickle.dumps(self._metrics))
        new.rename(self._folder / self._own)
        return self._own, self._metrics

    async def total(self) -> Metrics:
        """The sums over all workers, and over those that have died or do not answer."""
        alive = dict([await self.count(), *await self._peers.ask_all("count", limit_s=_ANSWER_S)])
        total = Metrics()
        for metrics in alive.values():
            total.add(metrics, gauges=True)
        for file in self._folder.glob("*.counts"):
            if file.name not in alive:
                total.add(pickle.loads(file.read_bytes()), gauges=False)
        return total
