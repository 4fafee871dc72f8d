"""A runner's result of an episode, in ROLL's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

STATUSES = ("Finished", "Failed", "NoData", "Timeout")
"""All statuses of an episode. NoData: there was nothing to run."""


class EpisodeResult:
    """`status`: one of `STATUSES`; any other makes the episode Failed. `score`: the episode's reward.

    `step_scores`: the rewards of the steps, in order. `metrics`: further numbers and texts, such as `pass_rate`.
    `error`: the exception that ended the episode, or None.
    """

    error: BaseException | None = None

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
        """The fields and the metrics in one dict; a field takes precedence over a metric of the same name."""
        return {
            **self.metrics,
            "status": self.status,
            "score": self.score,
            "step_scores": self.step_scores,
            "agent_exit_reason": self.agent_exit_reason,
        }


class InvalidResult(ValueError):
    """`run_job` returned an invalid result, or an environment an invalid reward."""


MAX_SCORE = 1e30
"""The largest reward that the server accepts and that fits a float32 of a batch."""


def check_scores(result: EpisodeResult) -> None:
    """Raise InvalidResult unless the score and the step scores are numbers that the server accepts; NaN is not."""
    if not all(abs(score) <= MAX_SCORE for score in (result.score, *result.step_scores)):
        told = f"{result.score}, {result.step_scores}"
        raise InvalidResult(f"run_job returned a score that is not a finite number up to {MAX_SCORE}: {told}"[:1000])


def checked_reward(reward: Any) -> float:
    """The reward of a step as a number. Raises InvalidResult for other values."""
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= MAX_SCORE:  # also true for NaN
        raise InvalidResult(
            f"the environment's step returned the reward {reward!r:.200}; it must be a finite number up to {MAX_SCORE}"
        )
    return number


def status_of(result: Any) -> str:
    """The status of a runner's result. Raises InvalidResult for a status that is not in `STATUSES`."""
    status = str(getattr(result.status, "value", result.status))
    if status in STATUSES:
        return status
    near = get_close_matches(status, STATUSES, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise InvalidResult(f"run_job returned the status {status!r}, which is none of {', '.join(STATUSES)}{meant}")


def not_a_result(result: Any, error: Exception) -> InvalidResult:
    """The error for a value without the fields of a result; `error`: the original exception."""
    return InvalidResult(
        f"run_job returned {type(result).__name__} {result!r:.200}; it must return an EpisodeResult, whose status is "
        f"one of {', '.join(STATUSES)}: {error}"
    )
