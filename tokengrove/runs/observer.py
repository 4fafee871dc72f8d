"""The events of a run, for progress displays and trainers."""

from __future__ import annotations

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.runs.summary import Summary


class Observer:
    """Receives the events of a run, on its event loop. Methods must neither block nor raise; these do nothing."""

    def planned(self, episodes: int, done: int, summary: Summary) -> None:
        """The run has `episodes` episodes, of which earlier starts have played `done`.

        `summary` is updated from now on, and may be read at any time.
        """

    def started(self, plan: EpisodePlan) -> None:
        """An attempt at an episode begins."""

    def retried(self, result: EpisodeResult) -> None:
        """An attempt failed, and the episode is retried."""

    def finished(self, result: EpisodeResult) -> None:
        """The last attempt at an episode has ended. `result.failure` is set if it failed."""

    def stopping(self, why: str) -> None:
        """No further episode begins, and running episodes are cancelled."""

    def exporting(self, target: str) -> None:
        """The training samples are being written."""

    def ended(self, summary: Summary) -> None:
        """The run is over; all files are written."""
