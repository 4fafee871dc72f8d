"""Metrics of this process for Prometheus, at `/metrics`. Labels have few values: never ids or model names.

`turns.commits` counts turns and tokens as they end; rates such as tokens per second are the reader's to compute.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Metrics:
    """The metrics of one server. Each has its own registry, so that several servers can share a process."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.turns = Counter(
            "tokengrove_turns", "Turns that ended, by API and status.", ["api", "status"], registry=self.registry
        )
        self.reasons = Counter(
            "tokengrove_interactions", "Complete interactions, by reason.", ["reason"], registry=self.registry
        )
        self.unaligned = Counter(
            "tokengrove_unaligned", "Complete interactions not aligned with their parent.", registry=self.registry
        )
        self.malformed = Counter(
            "tokengrove_malformed_calls", "Malformed tool calls, left as text.", registry=self.registry
        )
        self.tokens = Counter(
            "tokengrove_tokens",
            "Tokens of complete turns, by kind: prompt or output.",
            ["kind"],
            registry=self.registry,
        )
        self.in_flight = Gauge("tokengrove_in_flight", "Turns that are running.", registry=self.registry)
        self.sessions = Gauge("tokengrove_sessions_in_memory", "Sessions held in memory.", registry=self.registry)
        self.first_token = Histogram(
            "tokengrove_first_token_seconds",
            "Seconds from the start of a turn to its first token.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.duration = Histogram(
            "tokengrove_turn_seconds",
            "Seconds from the start of a turn to its commit.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def text(self) -> bytes:
        """Return the current values in Prometheus text format."""
        return generate_latest(self.registry)
