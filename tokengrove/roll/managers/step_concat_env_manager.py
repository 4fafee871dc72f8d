"""The direct loop step by step, with earlier observations in the prompt."""

from __future__ import annotations

from tokengrove.roll.managers.rollout_cache import RolloutCache
from tokengrove.roll.managers.step_env_manager import StepEnvManager
from tokengrove.roll.values import DataProto


class StepConcatEnvManager(StepEnvManager):
    """Like StepEnvManager, but the `history` of a prompt is the recent observations, one per line.

    This is the prompt of gem's wrapper for concatenated observations.
    """

    def format_messages(self, rollout_cache: RolloutCache) -> DataProto:
        """The prompt of this step. Fields of `agent_template`: `history` and `current_observation`.

        The current observation is followed by the environment's suffix on its own line.
        """
        content = rollout_cache.history[-1]
        current = f"{content['observation']}\n{content.get('suffix', '')}"
        recent = "\n".join(str(entry["observation"]) for entry in self._recent(rollout_cache))
        return self._prompt(rollout_cache, {"history": recent, "current_observation": current}, current)
