"""What a runner says of an episode, in ROLL's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class EpisodeResult:
    """`status` is Finished, Failed, NoData (there was nothing to run) or Timeout; `score` is the episode's reward.

    `step_scores` has a reward for each step, in order; `metrics` are further numbers and texts, such as `pass_rate`.
    """

    def __init__(
        self,
        status: str,
        score: float,
        step_scores: Sequence[float] | None = None,
        agent_exit_reason: str = "",
        metrics: Mapping[str, Any] | None = None,
    ) -> None:
        self.status = status
        self.score = score
        self.step_scores = list(step_scores or ())
        self.agent_exit_reason = agent_exit_reason
        self.metrics = dict(metrics or {})

    def __repr__(self) -> str:
        return (
            f"EpisodeResult(status={self.status!r}, score={self.score!r}, step_scores={self.step_scores!r}, "
            f"agent_exit_reason={self.agent_exit_reason!r}, metrics={self.metrics!r})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields in one dict; the metrics stand beside them, and give way to a field of the same name."""
        return {
            **self.metrics,
            "status": self.status,
            "score": self.score,
            "step_scores": self.step_scores,
            "agent_exit_reason": self.agent_exit_reason,
        }
