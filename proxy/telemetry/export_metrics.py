"""Metrics of exports: their duration and their content."""

from __future__ import annotations

from proxy.telemetry.families import Counts, Group, Histogram


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
