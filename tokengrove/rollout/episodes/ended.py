"""What an adapter raises for an episode that was not played to its end, though its agent did not raise."""

from __future__ import annotations

from typing import Literal

Unfinished = Literal["Failed", "NoData", "Timeout"]


class EpisodeEnded(Exception):
    """The episode is over with an outcome other than Finished. What was rewarded before stays.

    `outcome` is that of the session, and `message` its reason. NoData: there was nothing to play.
    """

    def __init__(self, outcome: Unfinished, message: str) -> None:
        super().__init__(message)
        self.outcome: Unfinished = outcome


class RewardFailed(Exception):
    """The agent played, but what should reward it failed, such as its verifier: the failure is `reward`."""
