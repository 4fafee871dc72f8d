"""Metrics of commits: their duration, the changes that share one, and their effects on sessions."""

from __future__ import annotations

from itertools import product

from proxy.telemetry.families import SHORT_SECONDS, Counts, Gauge, Group, Histogram

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
        self.withdrawn = Counts("tokengrove_sessions_withdrawn", "Sessions that were withdrawn, live or ended.")
        self.rewards = Counts("tokengrove_rewards_set", "Turns whose reward or rewards were set.")
