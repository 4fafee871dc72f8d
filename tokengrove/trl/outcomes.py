"""Decides which episodes count, and when a run ends because episodes fail."""

from __future__ import annotations

from collections.abc import Sequence

from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.rollout.failure_log import FailureLog


class NothingPlayed(RuntimeError):
    """The server is lost."""


def compared(result: EpisodeResult) -> bool:
    """Whether an episode counts: it was played to its end, or rewarded despite its timeout."""
    return result.failure is None or (result.failure == "timeout" and result.reward is not None)


class Outcomes:
    """The finished groups. `failures` counts the episodes that are not compared."""

    def __init__(self, failures: FailureLog) -> None:
        self._failures = failures

    def note(self, results: Sequence[EpisodeResult]) -> None:
        """Record a group. Raises NothingPlayed if the server is lost, and TooManyFailedEpisodes."""
        for result in results:
            self._failures.note(None if compared(result) else result.failed)
        if all(result.failure == "server" for result in results):
            raise NothingPlayed(f"the server is lost: {results[-1].message}")
