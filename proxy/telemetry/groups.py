"""The groups of metrics, each of the part of the server that counts it: labels, buckets and what is counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, Protocol

from proxy.telemetry.families import SHORT_SECONDS, Counts, Gauge, Group, Histogram, Merge, observe_all
from proxy.telemetry.http_request import HttpRequest

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
        self.server_prompt = Counts(
            "tokengrove_engine_server_prompt_tokens",
            "Prompt tokens of requests for which an engine server has reported its cached tokens.",
            "server",
        )
        self.server_cached = Counts(
            "tokengrove_engine_server_cached_tokens",
            "Those of these prompt tokens that the engine server had in its prefix cache.",
            "server",
        )

    def see(self, servers: Sequence[Mapping[str, Any]]) -> None:
        """Update the numbers from the servers of a pool: url, state, and once reached also in_flight, version,
        prompt_tokens and cached_tokens."""
        states = Counter(server["state"] for server in servers)
        self.servers.by = {(state,): states[state] for state in STATES}
        shown = servers[:_MOST_SERVERS]
        self.server_up.by = {(server["url"],): float(server["state"] == "alive") for server in shown}
        reached = [server for server in shown if "version" in server]
        self.server_in_flight.by = {(server["url"],): server["in_flight"] for server in reached}
        self.server_version.by = {(server["url"],): server["version"] for server in reached}
        self.server_prompt.by = Counter({(server["url"],): server["prompt_tokens"] for server in reached})
        self.server_cached.by = Counter({(server["url"],): server["cached_tokens"] for server in reached})


_CHANGES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)


class StoreMetrics(Group):
    """Counted by the store. The writer's thread counts transactions, the event loop everything else."""

    def __init__(self) -> None:
        self.transaction = Histogram(
            "tokengrove_transaction_seconds", "Seconds of a transaction that writes.", bounds=SHORT_SECONDS
        )
        self.changes = Histogram("tokengrove_transaction_changes", "Changes that share a transaction.", bounds=_CHANGES)
        self.refused = Counts(
            "tokengrove_refused_commits",
            "Transactions that the database refused, or that failed for an unknown reason.",
        )
        self.waiting = Gauge("tokengrove_database_waiting", "Changes and reads that wait for a database that is away.")
        self.waited = Counts(
            "tokengrove_database_waited",
            "Changes and reads that have waited for a database that was away, and what became of them.",
            *("what", "result"),
        )
        self.waited.expect(product(("changes", "reads"), ("done", "refused")))
        self.queued = Gauge("tokengrove_queued_changes", "Changes that wait for the writer.")
        self.started = Counts("tokengrove_sessions_started", "Sessions that were created in the database.")
        self.ended = Counts(
            "tokengrove_sessions_ended", "Sessions that were ended, by outcome (none: not given).", "outcome"
        )
        self.expired = Counts("tokengrove_sessions_expired", "Sessions that ended because nobody used them.")
        self.deleted = Counts("tokengrove_sessions_deleted", "Sessions that were deleted by a request.")
        self.removed = Counts(
            "tokengrove_sessions_removed", "Sessions that --keep-days or --keep removed: deleted or archived.", "how"
        )
        self.withdrawn = Counts("tokengrove_sessions_withdrawn", "Sessions that were withdrawn, live or ended.")
        self.removed.expect((how,) for how in ("deleted", "archived"))
        self.rewards = Counts("tokengrove_rewards_set", "Turns whose reward or rewards were set.")
        self.webhooks = Counts(
            "tokengrove_webhook_deliveries",
            "Attempts to deliver an event to a receiver (dead: that failed, and was the last one).",
            "result",
        )
        self.webhooks.expect((result,) for result in ("delivered", "failed", "dead"))


class Backlog(Protocol):
    """The numbers of sessions in the database by state.

    `oldest_end`: the end of the session that has waited the longest, in Unix seconds.
    """

    @property
    def active(self) -> int: ...

    @property
    def waiting(self) -> int: ...

    @property
    def leased(self) -> int: ...

    @property
    def oldest_end(self) -> float | None: ...


class SessionMetrics(Group):
    """Read when the metrics are read."""

    def __init__(self) -> None:
        self.in_memory = Gauge("tokengrove_sessions_in_memory", "Sessions held in memory.")
        self.stored = Gauge(
            "tokengrove_stored_sessions",
            "Sessions of the database, by state: active, waiting (ended, free to be claimed) or leased.",
            "state",
            merge=Merge.OWN,
        )
        self.claim_wait = Gauge(
            "tokengrove_claim_wait_seconds",
            "Seconds since the end of the session that has waited the longest to be claimed.",
            merge=Merge.OWN,
        )
        self.database_up = Gauge(
            "tokengrove_database_up", "1 if the database answers and took the last commit, else 0.", merge=Merge.LEAST
        )

    def see(self, backlog: Backlog | None, now: float, *, up: bool) -> None:
        """Update the gauges at `now` (Unix seconds). `backlog` None: the database does not answer."""
        self.database_up.by = {(): up}
        self.stored.by, self.claim_wait.by = {}, {}
        if backlog is not None:
            states = {"active": backlog.active, "waiting": backlog.waiting, "leased": backlog.leased}
            self.stored.by = {(state,): number for state, number in states.items()}
            self.claim_wait.by = {(): 0.0 if backlog.oldest_end is None else max(now - backlog.oldest_end, 0.0)}


class TurnMetrics(Group):
    """Counted by `turns`, once a turn has ended."""

    def __init__(self) -> None:
        self.ended = Counts("tokengrove_turns", "Turns that ended, by API and status.", "api", "status")
        self.interactions = Counts("tokengrove_interactions", "Complete interactions, by reason.", "reason")
        self.routes = Counts("tokengrove_route_turns", "Complete turns, by route in the table of models.", "route")
        self.unaligned = Counts("tokengrove_unaligned", "Complete interactions not aligned with their parent.")
        self.malformed = Counts("tokengrove_malformed_calls", "Malformed tool calls, left as text.")
        self.images = Counts(
            "tokengrove_images", "Images that turns brought and that were stored, once for each session."
        )
        self.image_bytes = Counts(
            "tokengrove_image_bytes", "Bytes of the images that turns brought and that were stored."
        )
        self.retries = Counts(
            "tokengrove_retries",
            "Requests that got an earlier attempt's answer: attached to it while it ran, or replayed.",
            "kind",
        )
        self.retries.expect([("attached",), ("replayed",)])
        self.tokens = Counts("tokengrove_tokens", "Tokens of complete turns, by kind: prompt or output.", "kind")
        self.cached = Counts(
            "tokengrove_cached_tokens", "Prompt tokens of complete turns that the engine had in its prefix cache."
        )
        self.in_flight = Gauge("tokengrove_in_flight", "Turns that are running.")
        self.queued = Gauge(
            "tokengrove_queued_choices",
            "Choices that wait because their session runs many and others run some too: the 16 sessions with most.",
            "host",
            "session",
        )
        self.unrecorded = Gauge(
            "tokengrove_unrecorded_turns", "Failed turns that wait in memory until the database takes them."
        )
        self.first_token = Histogram(
            "tokengrove_first_token_seconds", "Seconds from the start of a turn to its first token."
        )
        self.token_interval = Histogram(
            "tokengrove_output_token_seconds",
            "Mean seconds from one output token of a turn to the next, without the first.",
            bounds=SHORT_SECONDS,
        )
        self.phases = Histogram(
            "tokengrove_turn_phase_seconds",
            "Seconds that complete turns spent in a phase: queue, match, render, generate or commit.",
            "phase",
            bounds=SHORT_SECONDS,
        )
        self.duration = Histogram("tokengrove_turn_seconds", "Seconds from the start of a turn to its commit.")


_METHODS = frozenset({"GET", "POST", "DELETE", "PUT", "PATCH", "HEAD", "OPTIONS"})
_FAILURES = ("429", "500", "503")
"""Statuses that are shown with 0 for each route that was called, before they occur."""
_SECONDS = (0.005, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0, 30.0, 60.0, 300.0)


class HttpMetrics(Group):
    """Counted at the end of each request."""

    def __init__(self) -> None:
        self.requests = Counts(
            "tokengrove_http_requests",
            "HTTP requests that ended, by method, route (the template of the path) and status.",
            *("method", "route", "status"),
        )
        self.errors = Counts("tokengrove_errors", "HTTP requests answered with an error, by its code.", "code")
        self.duration = Histogram(
            "tokengrove_http_request_seconds",
            "Seconds from the head of a request to the end of its answer, by route.",
            "route",
            bounds=_SECONDS,
        )

    def count(self, request: HttpRequest) -> None:
        """Count a request that has ended."""
        method = request.method if request.method in _METHODS else "other"
        route = method, request.route
        if (*route, _FAILURES[0]) not in self.requests.by:
            self.requests.expect((*route, status) for status in _FAILURES)
        self.requests.by[*route, str(request.status)] += 1
        if request.code is not None:
            self.errors.by[(request.code,)] += 1
        observe_all(((self.duration, (request.route,), time.monotonic() - request.started),))


class ExportMetrics(Group):
    """Counted by the export endpoint, for exports and claims alike."""

    def __init__(self) -> None:
        self.duration = Histogram(
            "tokengrove_export_seconds",
            "Seconds from the first byte of an export's page to its last, by format.",
            "format",
        )
        self.sessions = Counts(
            "tokengrove_exported_sessions", "Sessions that were exported; a repetition counts again."
        )
        self.samples = Counts("tokengrove_exported_samples", "Samples that were exported; a repetition counts again.")
        of_sampler = ("trainer", "server", "dtype", "quantization", "version")
        self.mismatch = Gauge(
            "tokengrove_mismatch_kl",
            "Mean KL of the trainer's distribution from the sampler's, over the last 256 turns that a trainer told of.",
            *of_sampler,
            merge=Merge.MOST,
        )
        self.mismatch_ratio = Gauge(
            "tokengrove_mismatch_largest_ratio",
            "The largest ratio of the probabilities of a token between trainer and sampler, over the same turns.",
            *of_sampler,
            merge=Merge.MOST,
        )
        self.mismatch_named = Gauge(
            "tokengrove_mismatch_named",
            "1 if the sampler is named: its KL is above --mismatch-limit, or far above that of the other samplers.",
            *of_sampler,
            merge=Merge.MOST,
        )
