"""The activity of the server as one JSON object, for all workers, whichever answers.

It is computed only on request, at most once a second for all clients.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.api.statistics_json import counts_json, first_token_json, history_json, rates_json
from proxy.engine.gate import Gate
from proxy.store.counted_backlog import CountedBacklog
from proxy.telemetry.history import EVERY_S, SAMPLES, Sample
from proxy.telemetry.metrics import Snapshot
from proxy.workers.common_live import CommonLive
from tokengrove import __version__

HOUR_S = float(SAMPLES * EVERY_S)
MINUTE_S = 60.0
_SETTLED_S = 0.5
"""The delay after which a sample is shown: by then every worker has taken its sample."""
_AGAIN = 3
"""The number of samples that are fetched again, because a worker may have been late."""

Numbers = Callable[[], Awaitable[Snapshot]]
Servers = Callable[[], Awaitable[list[dict[str, Any]] | None]]
Rewards = Callable[[], Awaitable[dict[str, Any] | None]]


class Statistics:
    """Reads the numbers of a server. Use it on one event loop."""

    def __init__(
        self,
        gate: Gate,
        numbers: Numbers,
        live: CommonLive,
        servers: Servers,
        backlog: CountedBacklog,
        rewards: Rewards,
    ) -> None:
        """`numbers`: the metrics of this process, or of all workers. `servers`: of the engine; None if it has none."""
        self._gate, self._numbers, self._live = gate, numbers, live
        self._servers, self._backlog, self._rewards = servers, backlog, rewards
        self._reading: asyncio.Task[dict[str, Any]] | None = None
        self._read_at = float("-inf")
        self._samples: list[Sample] = []

    async def read(self, history_s: float = HOUR_S) -> dict[str, Any]:
        """The statistics, with the last `history_s` seconds of the history."""
        if self._reading is None or (self._reading.done() and time.monotonic() - self._read_at >= 1.0):
            self._read_at = time.monotonic()
            self._reading = asyncio.create_task(self._read())
        read = dict(await asyncio.shield(self._reading))
        samples = read.pop("samples")
        return {**read, "history": history_json(samples, read["at"] - history_s)}

    async def _read(self) -> dict[str, Any]:
        numbers, servers, backlog = await self._numbers(), await self._servers(), await self._backlog.read()
        now, info, paused = time.time(), self._gate.info(), self._gate.state.paused
        samples = await self._look_back(now)
        by_route = {name: counted._asdict() for name, counted in self._backlog.by_route.items()}
        oldest = None if backlog is None else backlog.oldest_end
        return {
            "at": now,
            "version": __version__,
            "engine": {
                "name": info.name,
                "model": info.model,
                "version": info.weight_version,
                "paused": None if paused is None else paused.value,
            },
            **counts_json(numbers),
            "rates": rates_json(samples, now),
            "first_token_s": first_token_json(numbers, samples, now),
            "sessions": None
            if backlog is None
            else {
                "active": backlog.active,
                "waiting": backlog.waiting,
                "leased": backlog.leased,
                "archived": backlog.archived,
                "oldest_wait_s": None if oldest is None else max(now - oldest, 0.0),
                **({"by_route": by_route} if by_route else {}),
            },
            "servers": servers,
            "rewards": await self._rewards(),
            "samples": samples,
        }

    async def _look_back(self, now: float) -> list[Sample]:
        """The samples of the last hour. Only the newest are fetched."""
        begin = self._samples[-1].slot - _AGAIN if self._samples else 0
        new = await self._live.samples(begin)
        self._samples = [*(each for each in self._samples if each.slot < begin), *new][-SAMPLES:]
        return [each for each in self._samples if each.at <= now - _SETTLED_S]
