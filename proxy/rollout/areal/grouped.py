"""Several episodes of one task at once: a group, whose rewards are compared with each other.

An episode that fails is left out like one without a result, and the others are kept. AReaL raises its exception, by
which the results of the others are lost.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from proxy.rollout.areal.group import group_set
from proxy.rollout.areal.rollout_workflow import RolloutWorkflow
from proxy.rollout.areal.tensor_rows import concat_padded_tensors


class GroupedRolloutWorkflow(RolloutWorkflow):
    """Runs `workflow` on the same data `group_size` times at once; the sessions have a `group_id` in common.

    `on_failure` says what an exception of one episode means: `drop`, the others are the group; or `raise`, it ends the
    others and is raised. Raises ValueError for a group of none, and for another word.
    """

    def __init__(
        self,
        workflow: Any,
        group_size: int,
        logger: logging.Logger | None = None,
        *,
        on_failure: Literal["drop", "raise"] = "drop",
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size must be >= 1, got {group_size}")
        if on_failure not in ("drop", "raise"):
            raise ValueError(f"on_failure is {on_failure!r}; it has to be 'drop' or 'raise'")
        self.workflow, self.group_size = workflow, group_size
        self.logger = logger or logging.getLogger(__name__)
        self._on_failure = on_failure

    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """Run the group; return the interactions of all its episodes by id, or their tensors one below the other.

        Tensors of different lengths are padded with zeros on the right. None if no episode has a result. If all have
        failed, the first exception is raised.
        """
        results = await self._results(engine, data)
        failures = [result for result in results if isinstance(result, BaseException)]
        found = [result for result in results if result is not None and not isinstance(result, BaseException)]
        if not found and failures:
            raise failures[0]
        if len(found) < self.group_size:
            told = "".join(f"; {type(error).__name__}: {error}" for error in failures)
            self.logger.warning(
                "GroupedRolloutWorkflow: %d/%d trajectories returned None or failed, using remaining results%s",
                *(self.group_size - len(found), self.group_size, told),
            )
        return _merged(found)

    async def _results(self, engine: Any, data: dict[str, Any]) -> list[dict[str, Any] | BaseException | None]:
        with group_set(f"group-{secrets.token_hex(8)}"):
            episodes = [asyncio.ensure_future(self.workflow.arun_episode(engine, data)) for _ in range(self.group_size)]
        try:
            return [*await asyncio.gather(*episodes, return_exceptions=self._on_failure == "drop")]
        except BaseException:
            for episode in episodes:
                episode.cancel()
            await asyncio.wait(episodes)  # each ends its session
            raise


def _merged(results: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """One dict of all results; None if they hold nothing."""
    if not all(_are_interactions(result) for result in results):
        return concat_padded_tensors(results) or None
    return {name: interaction for result in results for name, interaction in result.items()} or None


def _are_interactions(result: Mapping[str, Any]) -> bool:
    """Whether these are interactions, ours or AReaL's, and not tensors."""
    return all(hasattr(value, "to_tensor_dict") for value in result.values())
