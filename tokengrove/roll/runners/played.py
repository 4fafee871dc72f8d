"""An episode of any runner, always with a result."""

from __future__ import annotations

import asyncio
import logging
import math
from typing import Any

import httpx

from tokengrove.client.exit_reason import exit_reason
from tokengrove.roll.runners.agent_runner import EpisodeTimeout
from tokengrove.roll.runners.request_error import RequestError
from tokengrove.roll.values import EpisodeResult

_log = logging.getLogger(__name__)


def played(runner: Any, seed: int) -> EpisodeResult:
    """Run `runner.run_job(seed)`. An exception becomes a result, which keeps the rewards of the steps before it.

    A full context, or another limit of the session, ends an episode as Finished, with the metric `truncated`. A timeout
    becomes Timeout, and other exceptions Failed. `agent_exit_reason` describes the exception.
    """
    try:
        result: EpisodeResult = runner.run_job(seed)
        return result
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # threads are not cancelled: it is the runner's
        return ended_by(error, earned(runner))


def earned(runner: Any) -> list[float]:
    """The rewards of the steps of its running or last episode: its `step_scores`, or else its `env_rewards`.

    [] for a runner that has neither, or if they are not finite numbers.
    """
    given = [getattr(runner, name, None) for name in ("step_scores", "env_rewards")]
    try:
        scores = next(([float(score) for score in each] for each in given if each is not None and len(each)), [])
    except (TypeError, ValueError):
        scores = [math.nan]
    if all(map(math.isfinite, scores)):
        return scores
    _log.warning("the rewards of %s are not finite numbers and are lost: %.200r", type(runner).__name__, given)
    return []


def ended_by(error: BaseException, scores: list[float]) -> EpisodeResult:
    """The result of an episode that `error` ended, with the rewards of its earlier steps."""
    status = _status(error)
    metrics = {"truncated": True} if status == "Finished" else None
    result = EpisodeResult(status, float(sum(scores)), scores, exit_reason(error), metrics)
    result.error = error
    return result


def _status(error: BaseException) -> str:
    if isinstance(error, RequestError) and error.is_limit:
        return "Finished"
    if isinstance(error, EpisodeTimeout | httpx.TimeoutException | TimeoutError):
        return "Timeout"
    return "Failed"
