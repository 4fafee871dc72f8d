"""Metrics of one process for Prometheus, at `/metrics`. Labels have few values: never ids or model names.

`turns.commits` counts turns and tokens as they end; rates such as tokens per second are the reader's to compute. Counts
are plain numbers, which become Prometheus' metrics only when they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Durations:
    """A histogram of seconds."""

    def __init__(self) -> None:
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_SECONDS, seconds)] += 1
        self._sum += seconds

    def add(self, other: Durations) -> None:
        """Count the durations of another histogram, too."""
        self._counts = [one + more for one, more in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """Return the histogram as Prometheus has it: each bucket counts all durations up to its bound."""
        bounds, total, buckets = [*map(str, _SECONDS), "+Inf"], 0, []
        for bound, count in zip(bounds, self._counts, strict=True):
            total += count
            buckets.append((bound, total))
        return HistogramMetricFamily(name, text, buckets, self._sum)


class Metrics:
    """The metrics of one process, or the sums of several.

    `turns`: by API and status. `reasons`: complete interactions by reason. `tokens`: of complete turns by kind, prompt
    or output. `servers`: engine servers by state, as the process sees them that answers. Use it on the event loop only.
    It can be pickled.
    """

    def __init__(self) -> None:
        self.turns: Counter[tuple[str, str]] = Counter()
        self.reasons: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()
        self.servers: Counter[str] = Counter()
        self.unaligned = self.malformed = self.in_flight = self.waiting = self.sessions = 0
        self.first_token, self.duration = Durations(), Durations()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, as a collector of prometheus_client does."""
        turns = CounterMetricFamily(
            "tokengrove_turns", "Turns that ended, by API and status.", labels=["api", "status"]
        )
        for labels, count in self.turns.items():
            turns.add_metric(labels, count)
        yield turns
        yield _by("tokengrove_interactions", "Complete interactions, by reason.", "reason", self.reasons)
        yield CounterMetricFamily(
            "tokengrove_unaligned", "Complete interactions not aligned with their parent.", self.unaligned
        )
        yield CounterMetricFamily("tokengrove_malformed_calls", "Malformed tool calls, left as text.", self.malformed)
        yield _by("tokengrove_tokens", "Tokens of complete turns, by kind: prompt or output.", "kind", self.tokens)
        yield GaugeMetricFamily("tokengrove_in_flight", "Turns that are running.", self.in_flight)
        yield GaugeMetricFamily(
            "tokengrove_waiting", "Requests that wait for a paused engine, or for an engine server.", self.waiting
        )
        yield GaugeMetricFamily("tokengrove_sessions_in_memory", "Sessions held in memory.", self.sessions)
        if self.servers:
            servers = GaugeMetricFamily("tokengrove_engine_servers", "Engine servers, by state.", labels=["state"])
            for state, count in self.servers.items():
                servers.add_metric([state], count)
            yield servers
        yield self.first_token.family(
            "tokengrove_first_token_seconds", "Seconds from the start of a turn to its first token."
        )
        yield self.duration.family("tokengrove_turn_seconds", "Seconds from the start of a turn to its commit.")

    def text(self) -> bytes:
        """Return the current values in Prometheus text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry)

    def add(self, other: Metrics, *, gauges: bool) -> None:
        """Add the counts of another process, and its gauges if it is alive."""
        self.turns.update(other.turns)
        self.reasons.update(other.reasons)
        self.tokens.update(other.tokens)
        self.unaligned += other.unaligned
        self.malformed += other.malformed
        self.first_token.add(other.first_token)
        self.duration.add(other.duration)
        if gauges:
            self.in_flight += other.in_flight
            self.waiting += other.waiting
            self.sessions += other.sessions


def _by(name: str, text: str, label: str, counts: Mapping[str, int]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for value, count in counts.items():
        family.add_metric([value], count)
    return family
