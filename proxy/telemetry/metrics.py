"""The Prometheus metrics of one server, at `/metrics`: all groups, their total over processes, and their text."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder

from proxy.telemetry.families import Family
from proxy.telemetry.groups import EngineMetrics, ExportMetrics, HttpMetrics, SessionMetrics, StoreMetrics, TurnMetrics
from proxy.telemetry.history import History
from proxy.telemetry.process_metrics import ProcessMetrics

Snapshot = Mapping[str, Any]
"""The numbers of all families at one time, by name, as plain data that can be pickled."""


class Metrics:
    """The metrics of one process. Use it only on the event loop, except `text`."""

    def __init__(self, store: StoreMetrics | None = None) -> None:
        """`store`: the metrics that the store counts."""
        self.http = HttpMetrics()
        self.turns = TurnMetrics()
        self.engine = EngineMetrics()
        self.sessions = SessionMetrics()
        self.store = store or StoreMetrics()
        self.exports = ExportMetrics()
        self.process = ProcessMetrics()
        self.history = History(self.turns, self.engine, self.http)
        self.sources: list[Callable[[], Awaitable[None]]] = [self.process.look]

    @property
    def families(self) -> list[Family]:
        """All families."""
        groups = (self.http, self.turns, self.engine, self.sessions, self.store, self.exports, self.process)
        return [family for group in groups for family in group.families()]

    async def now(self) -> Snapshot:
        """The current numbers. The `sources` are updated first."""
        for source in self.sources:
            await source()
        return {family.name: family.now() for family in self.families}

    def total(self, alive: Sequence[Snapshot], gone: Sequence[Snapshot]) -> Snapshot:
        """The combined numbers of several processes: of those `alive`, this process first, and of those that ended."""
        return {
            family.name: family.total([each[family.name] for each in alive], [each[family.name] for each in gone])
            for family in self.families
        }

    def text(self, numbers: Snapshot, accept: str = "") -> tuple[bytes, str]:
        """Numbers as Prometheus or OpenMetrics text, as selected by an `Accept` header, and the media type."""
        encode, media_type = choose_encoder(accept)
        registry = CollectorRegistry()
        registry.register(_Read([family.metric(numbers[family.name]) for family in self.families]))
        return encode(registry), media_type


class _Read:
    """A collector of prometheus_client for metrics that have been read."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return iter(self._metrics)
