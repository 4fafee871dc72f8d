"""What a runner says of an episode, in ROLL's shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

STATUSES = ("Finished", "Failed", "NoData", "Timeout")
"""All that an episode can be; NoData: there was nothing to run."""


class EpisodeResult:
    """`status` is one of `STATUSES`, and any other makes the episode a failed one; `score` is the episode's reward.

    `step_scores` has a reward for each step, in order; `metrics` are further numbers and texts, such as `pass_rate`.
    `error` is the exception that has ended the episode, if one has.
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
        """The fields in one dict; the metrics stand beside them, and give way to a field of the same name."""
        return {
            **self.metrics,
            "status": self.status,
            "score": self.score,
            "step_scores": self.step_scores,
            "agent_exit_reason": self.agent_exit_reason,
        }


class InvalidResult(ValueError):
    """What `run_job` returned is no result, or what an environment gave is no reward."""


MAX_SCORE = 1e30
"""What the server takes as a reward, and a float32 of a batch can hold."""


def check_scores(result: EpisodeResult) -> None:
    """Raise InvalidResult unless the score and the step scores are numbers that the server takes; NaN is none."""
    if not all(abs(score) <= MAX_SCORE for score in (result.score, *result.step_scores)):
        told = f"{result.score}, {result.step_scores}"
        raise InvalidResult(f"run_job returned a score that is no finite number up to {MAX_SCORE}: {told}"[:1000])


def checked_reward(reward: Any) -> float:
    """The reward of a step as a number. Raises InvalidResult for anything else, which no score may be made of."""
    try:
        number = float(reward)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not abs(number) <= MAX_SCORE:  # NaN is not, either
        raise InvalidResult(
            f"the environment's step gave the reward {reward!r:.200}; it must be a finite number up to {MAX_SCORE}"
        )
    return number


def status_of(result: Any) -> str:
    """The status of what a runner returned. Raises InvalidResult for one that is none of `STATUSES`."""
    status = str(getattr(result.status, "value", result.status))
    if status in STATUSES:
        return status
    near = get_close_matches(status, STATUSES, 1)
    meant = f"; did you mean {near[0]}?" if near else ""
    raise InvalidResult(f"run_job returned the status {status!r}, which is none of {', '.join(STATUSES)}{meant}")


def not_a_result(result: Any, error: Exception) -> InvalidResult:
    """What is wrong with something that has not the fields of a result, as `error` says."""
    return InvalidResult(
        f"run_job returned {type(result).__name__} {result!r:.200}, and must return an EpisodeResult, whose status is "
        f"one of {', '.join(STATUSES)}: {error}"
    )
