"""The direct loop of environments that own the conversation: their observations are the messages to answer."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from tokengrove.errors import InvalidRequest
from tokengrove.roll.managers.conversation import as_sent, continued_prompt, whole_prompt
from tokengrove.roll.managers.history import earned
from tokengrove.roll.managers.rollout_cache import RolloutCache
from tokengrove.roll.managers.token_batch import lm_input_of
from tokengrove.roll.managers.traj_env_manager import TrajEnvManager
from tokengrove.roll.runners.environments import close
from tokengrove.roll.values import DataProto, EpisodeStopReason, GenerateStopReason, compute_object_hash


class AgentNativeStepEnvManager(TrajEnvManager):
    """Answers the messages of the environment's observation, with the `tools` of its `info`.

    Every step is a sample, and its state is its messages. If the messages begin with the last prompt and answer, the
    prompt continues their exact tokens; otherwise it is rendered anew. The environment decides when an episode ends.
    When the prompt leaves no room for an answer, it receives `EpisodeStopReason.MAX_LENGTH` as its action, and the
    episode ends. An environment whose `env_reset_failed` is true has failed to start.
    """

    layout = "individual"
    ends_at_max_steps: ClassVar[bool] = False

    def reset(self) -> RolloutCache | None:
        """Like `TrajEnvManager.reset`. Raises RuntimeError if the environment reports that it has failed to start."""
        self.tools, self._begun = [], time.monotonic()
        rollout_cache = super().reset()
        if rollout_cache is None:
            return None
        began = rollout_cache.history[0]
        if getattr(self.env, "env_reset_failed", False):
            self.stop_reason = EpisodeStopReason.ENV_RESET_FAILED
            raise RuntimeError(
                f"the environment has failed to start: {began.get('failure_mode') or 'it gives no reason'}"
            )
        self.tools = [as_plain(tool) for tool in began.get("tools") or ()]
        return rollout_cache

    def format_messages(self, rollout_cache: RolloutCache) -> DataProto:
        """The prompt of the environment's messages. Sets the entry's `prompt_ids` (all of it) and `state_hash`."""
        content = rollout_cache.history[-1]
        messages: list[dict[str, Any]] = content["observation"]
        if not isinstance(messages, list):
            raise InvalidRequest(
                f"the environment's observation must be a list of messages, not {type(messages).__name__}"
            )
        prompt_ids = self._continued(rollout_cache.history, messages)
        if prompt_ids is None:
            prompt_ids = whole_prompt(self._live, self._cleaned(rollout_cache, messages), **self._options())
        content.update(prompt_ids=prompt_ids, messages=list(messages), state_hash=compute_object_hash(messages))
        return lm_input_of(prompt_ids)

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
        """Like `TrajEnvManager.formulate_rollouts`; the last row's `trajectory_data` describes the whole episode."""
        last = rollout_cache.history[-1]["observation"] if rollout_cache.history else []
        rollout = super().formulate_rollouts(rollout_cache)
        column = rollout.non_tensor_batch["trajectory_data"]
        about = {**json.loads(column[-1]), **self._about(rollout_cache, rollout), "last_observation": last}
        column[-1] = json.dumps(about, default=str)
        return rollout

    def _continued(self, history: Sequence[Mapping[str, Any]], messages: list[dict[str, Any]]) -> list[int] | None:
        """The prompt that continues the tokens of the step before; None if the messages do not continue it."""
        if len(history) < 2 or "response_ids" not in history[-2]:
            return None
        before = history[-2]
        known = len(before["observation"]) + 1
        if len(messages) <= known or messages[: known - 1] != before["observation"]:
            return None
        if not self._is_answer(messages[known - 1], before):
            return None
        token_ids = [*before["prompt_ids"], *before["response_ids"]]
        given = (messages[:known], token_ids, len(before["response_ids"]), messages[known:])
        try:
            return continued_prompt(self._live, *given, **self._options())
        except InvalidRequest as error:
            self.logger.info("the messages are rendered anew: %s", error)
            return None

    def _is_answer(self, message: Mapping[str, Any], entry: Mapping[str, Any]) -> bool:
        """Whether a message of the environment is the answer of this step: its text, or its parsed text and calls."""
        if message.get("role") != "assistant":
            return False
        text = message.get("content") or ""
        if not message.get("tool_calls"):
            return isinstance(text, str) and text.strip() in {entry["llm_response"].strip(), _text_of(entry).strip()}
        parsed = self._live.parse(entry["response_ids"], tools=self.tools)
        return _calls(parsed) == _calls(message) and (parsed.get("content") or "").strip() == str(text).strip()

    def _cleaned(self, rollout_cache: RolloutCache, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages, with special tokens removed from the texts of answers."""
        answers = [entry for entry in rollout_cache.history if "response_ids" in entry and "llm_response" in entry]
        texts = {entry["llm_response"]: _text_of(entry) for entry in answers}
        return [
            {**message, "content": texts[text]}
            if message.get("role") == "assistant" and isinstance(text := message.get("content"), str) and text in texts
            else message
            for message in messages
        ]

    def _options(self) -> dict[str, Any]:
        return {**super()._options(), **({"tools": self.tools} if self.tools else {})}

    def _input_messages(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        return list(rollout_cache.history[-1]["messages"])

    def _observed(self, observation: Any) -> Any:
        return copy.deepcopy(observation)  # environments modify their history later

    def _action(self, llm_output: DataProto) -> Any:
        return self.stop_reason if llm_output.batch is None else super()._action(llm_output)

    def _advance(
        self, rollout_cache: RolloutCache, lm_output: DataProto, stop_reason: GenerateStopReason
    ) -> RolloutCache:
        super_cache = super()._advance(rollout_cache, lm_output, stop_reason)
        if stop_reason is GenerateStopReason.MAX_LENGTH:
            super_cache = self.step(lm_output)
            super_cache.truncated = True
        return super_cache

    def _wait_after_failed_reset(self) -> None:
        close(self.env)
        super()._wait_after_failed_reset()

    def _metrics(self, rollout_cache: RolloutCache) -> dict[str, float]:
        answered = [entry for entry in rollout_cache.history if "response_ids" in entry]
        prompts = [len(entry["prompt_ids"]) for entry in answered]
        responses = [len(entry["response_ids"]) for entry in answered]
        times = self.log_stats["generate_time"]
        speeds = [length / took for length, took in zip(responses, times, strict=False) if took > 0]
        return {
            **super()._metrics(rollout_cache),
            "env_timeout": float(bool(getattr(self.env, "env_timeout", False))),
            "traj_time_env_total": time.monotonic() - self._begun,
            "traj_time_reset": sum(self.log_stats["reset_time"]),
            "traj_time_generate_sum": sum(times),
            **_spread("traj_time_step", self.log_stats["step_time"]),
            **_spread("traj_time_generate", times),
            **_spread("traj_time_response_length", responses),
            **_spread("traj_time_tokens_per_second", speeds),
            **_spread("step_prompt_length", prompts),
            **_spread("step_response_length", responses),
        }

    def _about(self, rollout_cache: RolloutCache, rollout: DataProto) -> dict[str, Any]:
        """The episode in ROLL's sections."""
        history = rollout_cache.history
        metrics = self._metrics(rollout_cache)
        rewards = [float(entry["reward"]) for entry in history if entry.get("reward") is not None]
        last = history[-1] if history else {}
        failure = str(self.failure or last.get("failure_mode") or "")
        return {
            "current_step": self.current_step,
            "env_info": {
                **{"env_id": rollout_cache.env_id, "group_id": rollout_cache.group_id, "tag": rollout_cache.tag},
                **{"seed": self.group_seed, "episode_id": self.episode_id, "mode": self.mode},
                "max_steps": self.max_steps,
                "sequence_length": self.pipeline_config.sequence_length,
                **dict(getattr(self.env, "env_info", None) or {}),
            },
            "timing_info": {name: value for name, value in metrics.items() if name.startswith("traj_time")},
            "length_info": {
                "trajectory_length": rollout_cache.step,
                "num_actions": rollout_cache.step,
                "terminated": rollout_cache.terminated,
                "truncated": rollout_cache.truncated,
            },
            "reward_info": {
                "episode_reward": earned(history)[1],
                "step_rewards": rewards,
                "first_round_reward": rewards[0] if rewards else 0.0,
                "final_reward": rewards[-1] if rewards else 0.0,
            },
            "failure_info": {
                "failure_mode": failure,
                "stop_reason": self.stop_reason.name,
                "error_messages": last.get("error_messages", []),
                "test_output": last.get("test_output", ""),
                "has_failure": failure not in ("", "none"),
                "failure_step": rollout_cache.step,
            },
            "metrics": dict(rollout.meta_info["metrics"]),
        }


def as_plain(tool: Any) -> dict[str, Any]:
    """A tool as plain JSON: a mapping, or the dump of a pydantic model."""
    return dict(tool.model_dump() if hasattr(tool, "model_dump") else tool)


def _text_of(entry: Mapping[str, Any]) -> str:
    """The answer of a step without special tokens."""
    return str(entry["messages"][-1]["content"])


def _calls(message: Mapping[str, Any]) -> list[tuple[str, Any]]:
    calls = [call["function"] for call in as_sent(message).get("tool_calls") or ()]
    return [(call.get("name", ""), _parsed(call.get("arguments", "{}"))) for call in calls]


def _parsed(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, minimum and maximum of the values; 0 if there are none."""
    found = values or [0.0]
    return {name: float(np.mean(found)), f"{name}_min": float(min(found)), f"{name}_max": float(max(found))}
