"""The direct loop with an environment of gem: an episode is one conversation. Every method may be overridden."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import numpy as np

from tokengrove.errors import ContextLengthExceeded, InvalidRequest
from tokengrove.roll.managers.conversation import continued_prompt, whole_prompt
from tokengrove.roll.managers.direct_env_manager import DirectEnvManager
from tokengrove.roll.managers.llm_proxies import BaseLLMProxy, create_llm_proxy
from tokengrove.roll.managers.rollout_cache import RolloutCache
from tokengrove.roll.managers.token_batch import lm_input_of, token_ids_of
from tokengrove.roll.runners import make_environment
from tokengrove.roll.runners.environments import close
from tokengrove.roll.values import (
    DataProto,
    EpisodeStopReason,
    GenerateStopReason,
    compute_object_hash,
    rendered,
)
from tokengrove.roll.values.episode_result import checked_reward


class TrajEnvManager(DirectEnvManager):
    """Plays a `gem` environment: `reset`, then `make_decision` and `step` until it ends, then `formulate_rollouts`.

    The arguments are those of `DirectEnvManager`. The server renders prompts, whatever the `tokenizer`, so that each
    prompt continues the exact tokens before; `skip_mock_system_prompt` has no effect here.

    `env` is the environment, which is closed when the manager is garbage-collected, and `llm_proxy` the source of
    answers. `agent_system_template` and `agent_template` are those of the custom environment.
    """

    ends_at_max_steps: ClassVar[bool] = True
    """Whether an episode ends after `max_steps` steps, even if its environment continues."""

    def __init__(
        self,
        worker_config: Any,
        pipeline_config: Any,
        env_config: Any,
        tokenizer: Any = None,
        generate_scheduler: Any = None,
        output_queue: Any = None,
        thread_lock: AbstractContextManager[Any] | None = None,
        mode: str = "train",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            *(worker_config, pipeline_config, env_config, tokenizer, generate_scheduler, output_queue, thread_lock),
            *(mode, *args),
            **kwargs,
        )
        self.max_steps = int(self.env_config.get("max_steps") or 10)
        with self.thread_lock, self.env_step_limiter:
            self.env = self._make_environment()
        weakref.finalize(self, close, self.env)  # a manager may play again after its loop, so the loop cannot close it
        custom = getattr(pipeline_config, "custom_envs", None) or {}
        self.cfg_template = custom.get(self.env_config["tag"]) or self.env_config
        self.agent_system_template = self.cfg_template.get("agent_system_template")
        self.agent_template = self.cfg_template.get("agent_template")
        proxy_config = getattr(worker_config, "llm_proxy", None)
        self.llm_proxy: BaseLLMProxy = create_llm_proxy(self._live, proxy_config, self.tokenizer, self.env)

    def reset(self) -> RolloutCache | None:
        """Begin the next episode. None: the queue has none, or the environment has nothing to play."""
        self.rollout_cache = None
        self.failure, self.stop_reason, self.log_stats = None, EpisodeStopReason.FINISH, defaultdict(list)
        if not self.next_episode():
            return None
        self.rollout_cache = self._new_cache()
        self._running_session()
        with self.thread_lock, self.env_step_limiter:
            observation, info = self.env.reset(seed=self.episode_seed)
        if observation is None:
            self._end_session("the environment has nothing to play", "NoData")
            return None
        first = {"observation": self._observed(observation), "actions_left": self.max_steps, "messages": None}
        self.rollout_cache.history.append({**(info or {}), **first})
        return self.rollout_cache

    def make_decision(self, rollout_cache: RolloutCache) -> DataProto:
        """Ask the model for the next answer: `batch["responses"]` [1, R] and `meta_info["stop_reason"]`."""
        lm_input = self.format_messages(rollout_cache)
        prompt_ids = token_ids_of(lm_input.batch["input_ids"], "input_ids")
        room = self.pipeline_config.sequence_length - len(prompt_ids)
        if room <= 0:
            return self._no_room(f"{len(prompt_ids)} tokens, and sequence_length is {len(prompt_ids) + room}")
        content = rollout_cache.history[-1]
        lm_input.meta_info = {"src_rank": self.env_config["env_id"], "state_hash": content.get("state_hash")} | (
            lm_input.meta_info or {}
        )
        try:
            lm_output = self.llm_proxy.generate(
                messages=self._input_messages(rollout_cache),
                lm_input=lm_input,
                generation_config=self._generation_config(room),
            )
        except ContextLengthExceeded as error:
            return self._no_room(error.message)
        if lm_output is None:
            return DataProto(meta_info={"stop_reason": GenerateStopReason.ABORT})
        content.setdefault("prompt_ids", prompt_ids)
        self._remember(content, lm_output)
        lm_output.meta_info["stop_reason"] = GenerateStopReason.FINISH
        return lm_output

    def step(self, llm_output: DataProto) -> RolloutCache:
        """Take a step of the environment. The action is the answer's whole text, with its special tokens."""
        rollout_cache = self._current()
        action = self._action(llm_output)
        with self.thread_lock, self.env_step_limiter:
            observation, reward, terminated, truncated, info = self.env.step(action)
        info = dict(info or {})
        suffix = info.pop("suffix", None)
        rollout_cache.step += 1
        rollout_cache.terminated, rollout_cache.truncated = bool(terminated), bool(truncated)
        left = self.max_steps - rollout_cache.step
        if left <= 0:
            self._reach_max_steps(rollout_cache)
        rollout_cache.history[-1].update({**info, "reward": checked_reward(reward), "llm_response": str(action)})
        following = {"observation": self._observed(observation), "actions_left": left, "messages": None}
        rollout_cache.history.append(following if suffix is None else {**following, "suffix": suffix})
        return rollout_cache

    def format_messages(self, history: RolloutCache) -> DataProto:
        """The next prompt: all tokens so far, and what the chat template appends for the new observation.

        `batch["input_ids"]` [1, L] of the result is the prompt. Sets the entry's `prompt_ids` (the new tokens) and
        `messages` (those of this step).
        """
        content, earlier = history.history[-1], history.history[:-1]
        messages = self._messages_of(history)
        shown = {**content, "messages": messages}
        sent = self._sent(shown)
        known = [token for entry in earlier for token in (*entry["prompt_ids"], *entry["response_ids"])]
        if earlier:
            conversation = [message for entry in earlier for message in self._sent(entry)]
            sampled = len(earlier[-1]["response_ids"])
            input_ids = continued_prompt(self._live, conversation, known, sampled, sent, **self._options())
        else:
            input_ids = whole_prompt(self._live, sent, **self._options())
        content.update(prompt_ids=input_ids[len(known) :], messages=messages, state_hash=self._state_hash(shown))
        return lm_input_of(input_ids)

    def _sent(self, entry: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The messages of a step in the server's format."""
        return list(entry["messages"])

    def _state_hash(self, entry: Mapping[str, Any]) -> str:
        return compute_object_hash(entry["observation"])

    def _make_environment(self) -> Any:
        """The environment of `env_type` in its `tool_wrapper`. A `seed` in its parameters becomes the group's."""
        params = dict(self.env_config.get("config") or {})
        if "seed" in params:
            params["seed"] = self.env_config["group_seed"]
        return make_environment(self.env_config, params)

    def _observed(self, observation: Any) -> Any:
        """An observation for the history. Raises InvalidRequest for a picture."""
        if isinstance(observation, np.ndarray):
            message = (
                "the environment shows a picture, and this manager texts: use VLTrajEnvManager, or render_mode: text"
            )
            raise InvalidRequest(message, param="render_mode")
        return observation

    def _action(self, llm_output: DataProto) -> Any:
        """The action for the environment."""
        return self.tokenizer.batch_decode(llm_output.batch["responses"], skip_special_tokens=False)[0]

    def _reach_max_steps(self, rollout_cache: RolloutCache) -> None:
        self.stop_reason = EpisodeStopReason.MAX_STEPS
        if self.ends_at_max_steps:
            rollout_cache.truncated = rollout_cache.truncated or not rollout_cache.terminated
            rollout_cache.terminated = True

    def _messages_of(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        """The messages of this step: the observation rendered by the template, or as a tool's result."""
        history = rollout_cache.history
        content = history[-1]
        messages: list[dict[str, Any]] = []
        instruction = ""
        if len(history) == 1:
            if self.agent_system_template is not None:
                messages.append({"role": "system", "content": self.agent_system_template})
            if "env_instruction" in content:
                instruction = f"{content['env_instruction']}\n"
        elif history[-2].get("use_tool", False):
            return [{"role": "tool", "content": content["observation"]}]
        fields = {
            "observation": content["observation"],
            "turn_idx": rollout_cache.step + 1,
            "suffix": content.get("suffix", ""),
            "actions_left": content["actions_left"],
            "max_response_length": self.env_config.get("max_tokens_per_step"),
        }
        return [*messages, {"role": "user", "content": instruction + rendered(self._template(), fields)}]

    def _template(self) -> str:
        if self.agent_template is None:
            where = f"custom_envs.{self.env_config['tag']}.agent_template"
            raise InvalidRequest(f"{where} is missing: it renders observations for the model", param="agent_template")
        return str(self.agent_template)

    def _options(self) -> dict[str, Any]:
        """Options of the chat template. As in ROLL's direct managers, thinking is off unless it is enabled."""
        config = self.env_config.get("config") or {}
        return {"chat_template_kwargs": {"enable_thinking": bool(config.get("enable_thinking", False))}}

    def _generation_config(self, room: int) -> dict[str, Any]:
        """`generating_args`, with the smallest of the limits of an answer and the room that the prompt leaves."""
        given = getattr(self.worker_config, "generating_args", None) or {}
        config = dict(given.to_dict() if hasattr(given, "to_dict") else given)
        limits = (self.env_config.get("max_tokens_per_step"), config.get("max_new_tokens"), room)
        return {**config, "max_new_tokens": min(int(limit) for limit in limits if limit)}

    def _input_messages(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        """The conversation to answer."""
        return [message for entry in rollout_cache.history for message in entry["messages"] or ()]

    def _no_room(self, why: str) -> DataProto:
        self.logger.warning("the episode ends, since its prompt leaves no room for an answer: %s", why)
        return DataProto(meta_info={"stop_reason": GenerateStopReason.MAX_LENGTH})

    def _remember(self, content: dict[str, Any], lm_output: DataProto) -> None:
        """Add an answer to the history."""
        response_ids = token_ids_of(lm_output.batch["responses"], "responses")
        content["response_ids"] = response_ids
        if "infer_logprobs" in lm_output.batch.keys():  # noqa: SIM118 - a TensorDict has no `in`
            logprobs = np.asarray(lm_output.batch["infer_logprobs"]).reshape(-1)
            content["infer_logprobs"] = logprobs[len(logprobs) - len(response_ids) :].tolist()
        if (interaction_id := lm_output.meta_info.get("interaction_id")) is not None:
            content["interaction_id"] = interaction_id
        text = self.tokenizer.decode(response_ids, skip_special_tokens=True)
        content["messages"] = [*(content["messages"] or ()), {"role": "assistant", "content": text}]
