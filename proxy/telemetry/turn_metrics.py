"""Metrics of turns: how they end, their cost in tokens and time, and their retries."""

from __future__ import annotations

from proxy.telemetry.families import SHORT_SECONDS, Counts, Gauge, Group, Histogram


class TurnMetrics(Group):
    """Counted by `turns`, once a turn has ended."""

    def __init__(self) -> None:
        self.ended = Counts("tokengrove_turns", "Turns that ended, by API and status.", "api", "status")
        self.interactions = Counts("tokengrove_interactions", "Complete interactions, by reason.", "reason")
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
