"""Groups: several concurrent episodes of one task, whose rewards are compared with each other.

By default a failed episode is left out, like an episode without a result, and the others are kept. AReaL raises its
exception and loses the results of the others.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from tokengrove.areal.group import group_set
from tokengrove.areal.rollout_workflow import RolloutWorkflow
from tokengrove.areal.tensor_rows import concat_padded_tensors
from tokengrove.rollout.agent_call import contained
from tokengrove.rollout.failure_log import FailedEpisode, FailureLog, TooManyFailedEpisodes
from tokengrove.rollout.scheduler import Scheduler


class GroupResult(dict[str, Any]):
    """The interactions of a group by id, or its tensors. `failed_episodes`: how many of `episodes` have no result."""

    episodes: int = 0
    failed_episodes: int = 0


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs `workflow` on the same data `group_size` times concurrently; the sessions share a `group_id`.

    `on_failure`: `drop` leaves a failed episode out of the group; `raise` cancels the other episodes and raises its
    exception. `failures` counts the episodes without a result; an OpenAIProxyWorkflow shares its own log. After
    `max_failed_episodes` of them in a row (default: the workflow's limit, else three groups; -1: no limit)
    `arun_episode` raises TooManyFailedEpisodes. Raises ValueError for a `group_size` below 1 or an unknown
    `on_failure`.
    """

    def __init__(
        self,
        workflow: Any,
        group_size: int,
        logger: logging.Logger | None = None,
        *,
        on_failure: Literal["drop", "raise"] = "drop",
        max_failed_episodes: int | None = None,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        if on_failure not in ("drop", "raise"):
            raise ValueError(f"on_failure must be 'drop' or 'raise', not {on_failure!r}")
        self.workflow, self.group_size = workflow, group_size
        self.logger = logger or logging.getLogger(__name__)
        self._on_failure = on_failure
        own = getattr(workflow, "failures", None)
        self._counts = not isinstance(own, FailureLog)
        self.failures = own if isinstance(own, FailureLog) else FailureLog()
        self.failures.set_most(max_failed_episodes, group_size)

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run the group; return a `GroupResult`: the interactions of all episodes by id, or their concatenated tensors.

        Tensors of different lengths are padded with zeros on the right. None if no episode has a result. If no episode
        has a result and some failed, the first exception is raised. TooManyFailedEpisodes is always raised.
        """
        results = await self._results(engine, data)
        failures = [result for result in results if isinstance(result, Exception)]
        if (ended := next((each for each in failures if isinstance(each, TooManyFailedEpisodes)), None)) is not None:
            raise ended
        found = [result for result in results if result is not None and not isinstance(result, Exception)]
        if not found and failures:
            raise failures[0]
        if len(found) < self.group_size:
            told = "".join(f"; {type(error).__name__}: {error}" for error in failures)
            self.logger.warning(
                "GroupedRolloutWorkflow: %d/%d trajectories returned None or failed, using remaining results%s",
                *(self.group_size - len(found), self.group_size, told),
            )
        if (merged := _merged(found)) is None:
            return None
        group = GroupResult(merged)
        group.episodes, group.failed_episodes = self.group_size, self.group_size - len(found)
        return group

    async def _episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run one episode, and record its outcome unless the workflow records it."""
        given = data.get("task_id") if isinstance(data, Mapping) else None
        task = type(self.workflow).__name__ if given is None else str(given)
        try:
            with contained():
                result: dict[str, Any] | None = await self.workflow.arun_episode(engine, data)
        except Exception as error:
            if self._counts:
                self.failures.note(FailedEpisode.by(error, task))
            raise
        if self._counts:
            missing = FailedEpisode("NoResult", "the workflow returned None", task)
            self.failures.note(missing if result is None else None)
        return result

    async def _results(self, engine: Any, data: dict[str, Any]) -> list[dict[str, Any] | Exception | None]:
        results: dict[int, dict[str, Any] | Exception | None] = {}

        async def play(sample: int) -> None:
            try:
                results[sample] = await self._episode(engine, data)
            except Exception as error:
                if self._on_failure == "raise":
                    raise
                results[sample] = error

        with group_set(f"group-{secrets.token_hex(8)}"):
            await Scheduler(play, self.group_size).run(range(self.group_size))
        return [results[sample] for sample in range(self.group_size)]


def _merged(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """All results in one dict; None if they are empty."""
    if not all(_are_interactions(result) for result in results):
        return concat_padded_tensors(results) or None
    return {name: interaction for result in results for name, interaction in result.items()} or None


def _are_interactions(result: Mapping[str, Any]) -> bool:
    """Whether the values are interactions, ours or AReaL's, and not tensors."""
    return all(hasattr(value, "to_tensor_dict") for value in result.values())
