"""What became of one episode, in JSON's types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from tokengrove.rollout.failure_log import FailedEpisode

FailureKind = Literal["agent", "timeout", "no_data", "reward", "scorer", "server", "worker", "cancelled"]
"""Who failed: the agent raised or its command did not end with 0, it ran too long, it ended without a complete turn, a
reward function or scorer raised, the server could not be reached or refused, the process or node that ran the episode
died, or the run was ended."""


@dataclass(frozen=True, slots=True)
class EpisodeResult:
    """One attempt at one episode. `failure` is None if it was played to its end, and its session is Finished then.

    `reward` is the score of its session, None without one. `scores` are the values of scorers by name: of a scorer of
    turns the mean. `traceback` is that of the exception that has ended it, if one has. Tokens are those of the
    session's complete turns; `seconds` is the time from its start to its end.
    """

    task_id: str
    sample: int
    attempt: int
    session_id: str
    reward: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)
    failure: FailureKind | None = None
    message: str | None = None
    turns: int = 0
    prompt_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    traceback: str | None = None

    @property
    def failed(self) -> FailedEpisode | None:
        """The failed episode that this is: with a traceback its type is that of the exception, else `failure`."""
        if self.failure is None:
            return None
        kind, colon, message = (self.message or "").partition(": ")
        if not self.traceback or not colon or not kind.replace(".", "").isidentifier():
            kind, message = self.failure, self.message or "it said no reason"
        about = f"{self.task_id}, sample {self.sample}", self.session_id
        return FailedEpisode(kind, message, *about, self.traceback or "")

    def as_json(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)
