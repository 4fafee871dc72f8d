"""Exceptions of adapters for episodes that were not played to their end although their agent raised no exception."""

from __future__ import annotations

from typing import Literal

Unfinished = Literal["Failed", "NoData", "Timeout"]


class EpisodeEnded(Exception):
    """The episode ended with an outcome other than Finished. Earlier rewards remain.

    `outcome`: the outcome of the session; `message`: its reason. NoData: there was nothing to play.
    """

    def __init__(self, outcome: Unfinished, message: str) -> None:
        super().__init__(message)
        self.outcome: Unfinished = outcome


class RewardFailed(Exception):
    """The agent played, but its reward failed, for example in its verifier. The kind of the failure is `reward`."""
