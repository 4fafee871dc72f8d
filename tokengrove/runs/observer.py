"""What a run tells whoever watches it."""

from __future__ import annotations

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.runs.summary import Summary


class Observer:
    """Is told what happens in a run, on its event loop: a method must neither block nor raise. These do nothing."""

    def planned(self, episodes: int, done: int, summary: Summary) -> None:
        """The run has so many episodes; `done` of them have been played by an earlier start of it. `summary` is kept up
        to date from now on, and may be read at any time.
        """

    def started(self, plan: EpisodePlan) -> None:
        """An attempt at an episode begins."""

    def retried(self, result: EpisodeResult) -> None:
        """An attempt failed, and the episode is played again."""

    def finished(self, result: EpisodeResult) -> None:
        """The last attempt at an episode has ended: `result.failure` says whether it failed."""

    def stopping(self, why: str) -> None:
        """No further episode begins, and those that run are cancelled."""

    def exporting(self, target: str) -> None:
        """The training samples are being written."""

    def ended(self, summary: Summary) -> None:
        """The run is over; all files are written."""
