"""Metrics of the engine: its servers, its pauses, and requests that wait for it or are resubmitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.telemetry.families import Counts, Gauge, Group, Histogram, Merge

STATES = ("alive", "failing", "ejected", "leaving", "missing")
"""The states of an engine server."""

_MOST_SERVERS = 256
"""The maximum number of engine servers that are shown individually."""


class EngineMetrics(Group):
    """Counted by the gate and by the administration of the engine."""

    def __init__(self) -> None:
        self.waiting = Gauge("tokengrove_waiting", "Requests that wait for a paused engine, or for an engine server.")
        self.paused = Gauge("tokengrove_engine_paused", "1 while the engine is paused, else 0.", merge=Merge.MOST)
        self.pauses = Histogram("tokengrove_engine_pause_seconds", "Seconds of the pauses that ended, by mode.", "mode")
        self.version = Gauge(
            "tokengrove_engine_weight_version", "The version of the weights that new tokens get.", merge=Merge.MOST
        )
        self.resubmissions = Counts(
            "tokengrove_resubmissions",
            "Requests that were submitted to the engine again, after a pause or because their server was lost.",
            "cause",
        )
        self.resubmissions.expect([("pause",), ("lost",)])
        self.servers = Gauge("tokengrove_engine_servers", "Engine servers, by state.", "state", merge=Merge.OWN)
        self.server_up = Gauge(
            "tokengrove_engine_server_up",
            "1 if every process of the server gives new requests to the engine server, else 0.",
            "server",
            merge=Merge.LEAST,
        )
        self.server_in_flight = Gauge(
            "tokengrove_engine_server_in_flight", "Requests that an engine server runs.", "server"
        )
        self.server_version = Gauge(
            "tokengrove_engine_server_weight_version",
            "The version of the weights that an engine server has, once it was reached.",
            "server",
            merge=Merge.MOST,
        )

    def see(self, servers: Sequence[Mapping[str, Any]]) -> None:
        """Update the gauges from the servers of a pool: url, state, and once reached also in_flight and version."""
        states = Counter(server["state"] for server in servers)
        self.servers.by = {(state,): states[state] for state in STATES}
        shown = servers[:_MOST_SERVERS]
        self.server_up.by = {(server["url"],): float(server["state"] == "alive") for server in shown}
        reached = [server for server in shown if "version" in server]
        self.server_in_flight.by = {(server["url"],): server["in_flight"] for server in reached}
        self.server_version.by = {(server["url"],): server["version"] for server in reached}
