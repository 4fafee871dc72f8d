"""Counters of this process, as Prometheus text at `/metrics`. Labels are closed sets: no ids, no model names."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """One registry a server, so that several apps in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter("tokengrove_turns", "Ended turns.", ["api", "status"], registry=self.registry)
        self.reasons = Counter(
            "tokengrove_interactions", "Complete interactions by reason.", ["reason"], registry=self.registry
        )
        self.unaligned = Counter(
            "tokengrove_unaligned", "Children not joined with their parent.", registry=self.registry
        )
        self.malformed = Counter("tokengrove_malformed_calls", "Tool calls left as text.", registry=self.registry)
        self.tokens = Counter("tokengrove_tokens", "Tokens of complete turns.", ["kind"], registry=self.registry)
        self.in_flight = Gauge("tokengrove_in_flight", "Turns being generated.", registry=self.registry)
        self.sessions = Gauge("tokengrove_sessions_in_memory", "Sessions held in memory.", registry=self.registry)
        self.first_token = Histogram(
            "tokengrove_first_token_seconds", "Request to first token.", buckets=_SECONDS, registry=self.registry
        )
        self.duration = Histogram(
            "tokengrove_turn_seconds", "Request to commit.", buckets=_SECONDS, registry=self.registry
        )

    def text(self) -> bytes:
        """The Prometheus exposition of now."""
        return generate_latest(self.registry)
