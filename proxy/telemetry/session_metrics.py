"""Metrics of sessions: in memory, and in the database by state."""

from __future__ import annotations

from typing import Protocol

from proxy.telemetry.families import Gauge, Group, Merge


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
