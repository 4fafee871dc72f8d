"""The direct loop step by step: every prompt is independent, and every step is a sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.roll.managers.conversation import whole_prompt
from tokengrove.roll.managers.rollout_cache import RolloutCache
from tokengrove.roll.managers.token_batch import lm_input_of
from tokengrove.roll.managers.traj_env_manager import TrajEnvManager
from tokengrove.roll.values import DataProto, compute_object_hash, rendered

_INVALID = (
    " (this action was not valid: a new answer must follow the format that the instructions of the environment ask for)"
)


class StepEnvManager(TrajEnvManager):
    """Each prompt has the system message and one user message: instruction, recent steps and current observation.

    `history_length` of the custom environment is the number of steps in a prompt, including the current one. Steps in
    the same state, by the hash of their observation, are compared with each other.
    """

    layout = "individual"

    def format_messages(self, rollout_cache: RolloutCache) -> DataProto:
        """The prompt of this step, like `TrajEnvManager.format_messages`; also sets the entry's `state_hash`.

        Fields of `agent_template`: `env_instruction`, `history` (the recent steps), `history_length` (their number),
        `step_count` (the steps before this one), `current_step` (from 1), `current_observation` and
        `max_response_length`.
        """
        content = rollout_cache.history[-1]
        recent = self._recent(rollout_cache)
        first = rollout_cache.step - len(recent) + 1
        steps = [_step_text(entry, first + at) for at, entry in enumerate(recent)]
        fields = {
            "env_instruction": rollout_cache.history[0].get("env_instruction", ""),
            "history": ", ".join(steps),
            "history_length": len(recent),
            "step_count": rollout_cache.step,
            "current_step": rollout_cache.step + 1,
            "current_observation": content["observation"],
            "max_response_length": self.env_config.get("max_tokens_per_step"),
        }
        return self._prompt(rollout_cache, fields, content["observation"])

    def _recent(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        """The steps before the current one within the window."""
        window = int(self.cfg_template.get("history_length") or 1)
        return rollout_cache.history[-window:-1]

    def _prompt(self, rollout_cache: RolloutCache, fields: Mapping[str, Any], state: Any) -> DataProto:
        messages: list[dict[str, Any]] = []
        if self.agent_system_template is not None:
            messages.append({"role": "system", "content": self.agent_system_template})
        messages.append({"role": "user", "content": rendered(self._template(), fields)})
        return self._of_messages(rollout_cache, messages, state)

    def _of_messages(self, rollout_cache: RolloutCache, messages: Sequence[dict[str, Any]], state: Any) -> DataProto:
        prompt_ids = whole_prompt(self._live, messages, **self._options())
        about = {"prompt_ids": prompt_ids, "messages": list(messages), "state_hash": compute_object_hash(state)}
        rollout_cache.history[-1].update(about)
        return lm_input_of(prompt_ids)

    def _input_messages(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        return list(rollout_cache.history[-1]["messages"] or ())


def _step_text(entry: Mapping[str, Any], number: int) -> str:
    """A step in words: state, action (as the environment parsed it, if available) and reward."""
    action = entry["action_content"] if "action_content" in entry else _answer_text(entry)
    is_valid = (entry.get("metrics") or {}).get("action_is_valid", True)
    told = f"{action}{'' if is_valid else _INVALID}"
    return f"(step: {number}, observation: {entry['observation']}, action: {told}, reward: {entry.get('reward')})"


def _answer_text(entry: Mapping[str, Any]) -> str:
    """The answer without special tokens, which would end the message that contains it."""
    said, text = str(entry.get("llm_response", "")), str(entry["messages"][-1]["content"])
    return text if text in said else said
