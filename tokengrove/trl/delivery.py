"""Delivery of the samples of a finished group to the trainer's buffer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tokengrove.client import AsyncClient
from tokengrove.client.adapters.trl import rollout_samples
from tokengrove.client.values import Sample
from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.trl.buffer import Buffer
from tokengrove.trl.metrics import Metrics, Value, of_group
from tokengrove.trl.outcomes import compared


class Delivery:
    """Reads samples from `client`, and puts rows into `buffer` in the order of their sessions."""

    def __init__(self, client: AsyncClient, buffer: Buffer, metrics: Metrics, max_staleness: int | None) -> None:
        self._client, self._buffer, self._metrics = client, buffer, metrics
        self._max_staleness = max_staleness
        self._turn = asyncio.Lock()  # one group at a time, so that its rows are adjacent

    async def deliver(self, number: int, results: Sequence[EpisodeResult], version: Callable[[], int]) -> None:
        """Deliver the rows of group `number` when there is room. `version()` returns the version of the trainer's
        weights.

        Raises ProxyError if the server is lost.
        """
        samples = await self._samples(results)
        rows = rollout_samples(samples, dict.fromkeys((str(sample.group_id) for sample in samples), number))
        fresh = [each for each in rows if not self._is_stale(each, version())]
        async with self._turn:
            blocked_s = sum([await self._buffer.put_when_free(each) for each in fresh])
        lags = [float(version() - each.model_version) for each in fresh]
        values: dict[str, Value] = {**of_group(results), "rollout/backpressure_s": blocked_s}
        if lags:
            values |= {"rollout/version_lag": float(np.mean(lags)), "rollout/version_lag_max": max(lags)}
        if len(rows) > len(fresh):
            values["rollout/dropped_stale_total"] = float(len(rows) - len(fresh))
        self._metrics.put(values)

    async def _samples(self, results: Sequence[EpisodeResult]) -> list[Sample]:
        names = [result.session_id for result in results if compared(result)]
        if not names:
            return []
        export = await self._client.export(session_ids=names, layout="concat", include=["messages"])
        return export.samples

    def _is_stale(self, row: Any, version: int) -> bool:
        return self._max_staleness is not None and version - row.model_version > self._max_staleness
