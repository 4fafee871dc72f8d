"""The direct loop: the manager itself plays its environment, and an episode is one conversation.

Every method may be overridden as in ROLL. The tokens of a decision are those that the engine got and sampled: its
history holds them, the session records them, and `formulate_rollouts` exports them, so the three cannot differ.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar, TypeVar

import numpy as np

from proxy.client import Session
from proxy.client.exit_reason import exit_reason
from proxy.errors import ContextLengthExceeded, InvalidRequest, ProxyError
from proxy.rollout.roll.managers.base_env_manager import BaseEnvManager
from proxy.rollout.roll.managers.conversation import continued_prompt, whole_prompt
from proxy.rollout.roll.managers.episode_session import EpisodeSession
from proxy.rollout.roll.managers.history import Layout, amended, earned
from proxy.rollout.roll.managers.live_session import LiveSession
from proxy.rollout.roll.managers.llm_proxies import BaseLLMProxy, create_llm_proxy
from proxy.rollout.roll.managers.rollout_cache import RolloutCache
from proxy.rollout.roll.managers.rollouts import rollout_of
from proxy.rollout.roll.managers.token_batch import lm_input_of, token_ids_of
from proxy.rollout.roll.runners import make_environment
from proxy.rollout.roll.values import (
    DataProto,
    EpisodeResult,
    EpisodeStopReason,
    GenerateStopReason,
    aggregate_metrics,
    as_section,
    compute_object_hash,
    rendered,
)
from proxy.rollout.server_tokenizer import ServerTokenizer

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST_ABORTS = 3


class TrajEnvManager(BaseEnvManager):
    """Plays a `gem` environment: `reset`, then `make_decision` and `step` until it ends, then `formulate_rollouts`.

    The arguments are those of `BaseEnvManager`. `tokenizer` may be None: `self.tokenizer` is then the server's, over
    HTTP, with the methods of one of transformers. Prompts are rendered by the server in any case, so that a next one
    continues the exact tokens of the last; `skip_mock_system_prompt` has nothing to skip here.

    `env` is the environment, `rollout_cache` the running episode, `episode` its session and `llm_proxy` what answers.
    `agent_system_template` and `agent_template` are those of the custom environment.
    """

    layout: ClassVar[Layout] = "concat"
    """The layout of the export: one sample for each conversation, or one for each step."""
    ends_at_max_steps: ClassVar[bool] = True
    """Whether an episode ends after `max_steps` steps, though its environment goes on."""
    reset_backoff_s: ClassVar[float] = 10.0
    """Seconds by which the pause grows after each `env.reset` in a row that has failed."""

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
        given = (worker_config, pipeline_config, as_section(env_config), tokenizer, generate_scheduler, output_queue)
        super().__init__(*given, thread_lock, mode, *args, **kwargs)
        self.logger = _log
        self.rollout_cache: RolloutCache | None = None
        self.episode: EpisodeSession | None = None
        self.failure: Exception | None = None
        self.tools: list[dict[str, Any]] = []
        self.stop_reason = EpisodeStopReason.FINISH
        self.log_stats: dict[str, list[float]] = defaultdict(list)
        self._stopped = threading.Event()
        self._failed_resets = 0
        self._live = LiveSession(generate_scheduler, self._running_session)
        if self.tokenizer is None:
            self.tokenizer = ServerTokenizer(self._live)
        with self.thread_lock, self.env_step_limiter:
            self.env = self._make_environment()
        custom = getattr(pipeline_config, "custom_envs", None) or {}
        self.cfg_template = custom.get(self.env_config["tag"]) or self.env_config
        self.agent_system_template = self.cfg_template.get("agent_system_template")
        self.agent_template = self.cfg_template.get("agent_template")
        proxy_config = getattr(worker_config, "llm_proxy", None)
        self.llm_proxy: BaseLLMProxy = create_llm_proxy(self._live, proxy_config, self.tokenizer, self.env)

    # The loop

    def run_rollout_loop(self, data: DataProto) -> None:
        """Play episodes until the queue has no more; `data.meta_info["seed"]` is the seed of the run.

        An exception of the environment, or of the model's, fails the episode: its session says so, its rollout has what
        was sampled and earned before, and the next episode begins. Raises what keeps an episode from being recorded:
        errors of the queue, of a session's start or export, and of a `formulate_rollouts` of one's own.
        """
        self._stopped.clear()
        self.begin(data)
        try:
            while self.running and self._play_episode():
                pass
        finally:
            self._end_session("the manager was stopped")
        self.put(None)

    def _play_episode(self) -> bool:
        """Play one episode and hand in its rollout. Return False if none is left."""
        rollout_cache: RolloutCache | None = None
        try:
            rollout_cache = self._timed("reset_time", self.reset)
            if rollout_cache is None:
                return False
            self._failed_resets = 0
            rollout_cache = self._play(rollout_cache)
        except Exception as error:
            if self.running:
                self._fail(error)
        if not self.running:
            return False
        self.put(self._formulated(rollout_cache or self.rollout_cache or self._new_cache()))
        if rollout_cache is None:
            self._wait_after_failed_reset()
        return True

    def _play(self, rollout_cache: RolloutCache) -> RolloutCache:
        aborts = 0
        while self.running and not (rollout_cache.terminated or rollout_cache.truncated):
            lm_output = self._timed("generate_time", lambda: self.make_decision(rollout_cache))  # noqa: B023 - called here
            self.log_stats["current_step"].append(self.current_step)
            stop_reason = GenerateStopReason.of(lm_output.meta_info.pop("stop_reason"))
            if stop_reason is GenerateStopReason.ABORT:
                aborts += 1
                if aborts == _MOST_ABORTS:
                    raise RuntimeError(f"the model was asked {aborts} times, and nothing was sampled")
                continue
            aborts = 0
            rollout_cache = self._timed("step_time", lambda: self._advance(rollout_cache, lm_output, stop_reason))  # noqa: B023
        return rollout_cache

    def _advance(
        self, rollout_cache: RolloutCache, lm_output: DataProto, stop_reason: GenerateStopReason
    ) -> RolloutCache:
        """Go on after a decision: one step of the environment, or the end for want of room."""
        if stop_reason is GenerateStopReason.FINISH:
            return self.step(lm_output)
        self.stop_reason = EpisodeStopReason.MAX_LENGTH
        rollout_cache.truncated = True
        return rollout_cache

    def _fail(self, error: Exception) -> None:
        """Note that the episode has failed. Raises the error if there is no session to say so."""
        if self.episode is None:
            raise error
        self.failure = error
        place = f"group {self.env_config['group_id']} env {self.env_config['env_id']} episode {self.episode_id}"
        self.logger.error("%s has failed: %s", place, error, exc_info=error)

    def _formulated(self, rollout_cache: RolloutCache) -> DataProto:
        """The rollout, with the names that the trainer groups by, after the end of the session."""
        try:
            rollout = self.formulate_rollouts(rollout_cache)
        except Exception:
            if self.failure is None:
                raise
            self.logger.exception("formulate_rollouts cannot take the history of the failed episode")
            rollout = TrajEnvManager.formulate_rollouts(self, rollout_cache)
        episode = self._ended(rollout_cache)
        names = {"traj_group_id": episode.traj_group_id, "traj_id": f"{episode.traj_group_id}_{episode.env_id}"}
        for name, value in names.items():
            rollout.non_tensor_batch.setdefault(name, np.array([value] * len(rollout), dtype=object))
        rollout.meta_info.setdefault("session_id", episode.session.session_id)
        return rollout

    def _wait_after_failed_reset(self) -> None:
        self._failed_resets += 1
        self._stopped.wait(min(3600.0, self.reset_backoff_s * self._failed_resets))

    def stop(self) -> None:
        """Play no further episode, and end the running one: what it asks for next is refused."""
        super().stop()
        self._stopped.set()
        if (episode := self.episode) is not None:
            with suppress(ProxyError):  # the loop ends it, too
                episode.fail("the manager was stopped", within_s=0.0)

    # The four steps of an episode

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
        left = self.env_config["max_steps"]
        self.rollout_cache.history.append(
            {"observation": self._observed(observation), "actions_left": left, "messages": None, **(info or {})}
        )
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
        self._remember(content, lm_output)
        lm_output.meta_info["stop_reason"] = GenerateStopReason.FINISH
        return lm_output

    def step(self, llm_output: DataProto) -> RolloutCache:
        """Let the environment take the answer as its action: the answer's whole text, with its special tokens."""
        rollout_cache = self._current()
        action = self._action(llm_output)
        with self.thread_lock, self.env_step_limiter:
            observation, reward, terminated, truncated, info = self.env.step(action)
        info = dict(info or {})
        suffix = info.pop("suffix", None)
        rollout_cache.step += 1
        rollout_cache.terminated, rollout_cache.truncated = bool(terminated), bool(truncated)
        left = self.env_config["max_steps"] - rollout_cache.step
        if left <= 0:
            self._reach_max_steps(rollout_cache)
        rollout_cache.history[-1].update({"reward": reward, "llm_response": str(action), **info})
        following = {"observation": self._observed(observation), "actions_left": left, "messages": None}
        rollout_cache.history.append(following if suffix is None else {**following, "suffix": suffix})
        return rollout_cache

    def format_messages(self, history: RolloutCache) -> DataProto:
        """The next prompt: all tokens so far, and what the chat template appends for the new observation.

        `batch["input_ids"]` [1, L] of the result is the prompt. The entry gets `prompt_ids` (what is new) and
        `messages` (those of this step).
        """
        content, earlier = history.history[-1], history.history[:-1]
        messages = self._messages_of(history)
        known = [token for entry in earlier for token in (*entry["prompt_ids"], *entry["response_ids"])]
        if earlier:
            conversation = [message for entry in earlier for message in entry["messages"]]
            sampled = len(earlier[-1]["response_ids"])
            input_ids = continued_prompt(self._live, conversation, known, sampled, messages, **self._options())
        else:
            input_ids = whole_prompt(self._live, messages, **self._options())
        content.update(
            prompt_ids=input_ids[len(known) :],
            messages=messages,
            state_hash=compute_object_hash(content["observation"]),
        )
        return lm_input_of(input_ids)

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
        """End the episode's session with what the history has earned, and lay out its samples.

        The last observation, which nothing has answered, is taken off the history. An episode without any answer has
        one row of padding, and `drop_flag` in `meta_info` if its environment failed to begin.
        """
        if rollout_cache.history and not {"response_ids", "reward"} & rollout_cache.history[-1].keys():
            rollout_cache.history.pop()
        episode = self._ended(rollout_cache)
        rollout = rollout_of(
            episode,
            mode="traj" if self.layout == "concat" else "step",
            sequence_length=self.pipeline_config.sequence_length,
            pad_token_id=getattr(self.tokenizer, "pad_token_id", None) or 0,
            amended=lambda samples: amended(samples, rollout_cache.history, episode, self.layout, self.tools),
        )
        rollout.meta_info["metrics"] |= {
            f"env/{rollout_cache.tag}/{name}": value for name, value in self._metrics(rollout_cache).items()
        }
        if self.failure is not None and not rollout_cache.history:
            rollout.meta_info["drop_flag"] = True
        return rollout

    # Their parts

    def _make_environment(self) -> Any:
        """The environment of `env_type` in its `tool_wrapper`; a `seed` among its parameters is the group's."""
        params = dict(self.env_config.get("config") or {})
        if "seed" in params:
            params["seed"] = self.env_config["group_seed"]
        return make_environment(self.env_config, params)

    def _observed(self, observation: Any) -> Any:
        """An observation as the history keeps it."""
        return observation

    def _action(self, llm_output: DataProto) -> Any:
        """What the environment is given."""
        return self.tokenizer.batch_decode(llm_output.batch["responses"], skip_special_tokens=False)[0]

    def _reach_max_steps(self, rollout_cache: RolloutCache) -> None:
        self.stop_reason = EpisodeStopReason.MAX_STEPS
        if self.ends_at_max_steps:
            rollout_cache.truncated = rollout_cache.truncated or not rollout_cache.terminated
            rollout_cache.terminated = True

    def _messages_of(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        """The messages of this step: the observation as the template shows it, or as a tool's result."""
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
            raise InvalidRequest(f"{where} is missing: it shows the model an observation", param="agent_template")
        return str(self.agent_template)

    def _options(self) -> dict[str, Any]:
        """What the chat template is told: ROLL's direct managers do not let the model think, unless told to."""
        config = self.env_config.get("config") or {}
        return {"chat_template_kwargs": {"enable_thinking": bool(config.get("enable_thinking", False))}}

    def _generation_config(self, room: int) -> dict[str, Any]:
        """`generating_args`, with the least of the limits of an answer and the room that the prompt leaves."""
        given = getattr(self.worker_config, "generating_args", None) or {}
        config = dict(given.to_dict() if hasattr(given, "to_dict") else given)
        limits = (self.env_config.get("max_tokens_per_step"), config.get("max_new_tokens"), room)
        return {**config, "max_new_tokens": min(int(limit) for limit in limits if limit)}

    def _input_messages(self, rollout_cache: RolloutCache) -> list[dict[str, Any]]:
        """The conversation that is to be answered."""
        return [message for entry in rollout_cache.history for message in entry["messages"]]

    def _no_room(self, why: str) -> DataProto:
        self.logger.warning("the episode ends, as its prompt leaves no room for an answer: %s", why)
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
        content["messages"] = [*content["messages"], {"role": "assistant", "content": text}]

    def _metrics(self, rollout_cache: RolloutCache) -> dict[str, float]:
        """What the environment has measured, as its `metrics_agg_mode` says, and the number of steps."""
        history = rollout_cache.history
        modes = history[-1].get("metrics_agg_mode") or {} if history else {}
        measured = aggregate_metrics([entry.get("metrics") or {} for entry in history], modes)
        return {**measured, "num_actions": rollout_cache.step}

    # The session

    def _running_session(self) -> Session | None:
        """The session of the running episode, started when it is first needed; None if no episode runs."""
        if self.episode_id is None or self.group_seed is None:
            return None
        if self.episode is None:
            self._live.answers.clear()
            self.episode = EpisodeSession.start(
                self.generate_scheduler,
                env_config=self.env_config,
                worker_config=self.worker_config,
                pipeline_config=self.pipeline_config,
                mode=self.mode,
                episode_id=self.episode_id,
                seed=self.episode_seed,
                group_seed=self.group_seed,
                step=self.start_step,
                may_wait=lambda: self.running,
                sampling_policy="default",  # what a make_decision of one's own asks for counts
            )
        return self.episode.session

    def _ended(self, rollout_cache: RolloutCache) -> EpisodeSession:
        """The episode's session, after its end with outcome, rewards and metrics."""
        if self._running_session() is None or self.episode is None:
            raise RuntimeError("no episode runs: reset() begins one")
        if self.episode.outcome is None:
            self._live.name_turns(rollout_cache.history)
            rewards, score = earned(rollout_cache.history)
            reason = self.stop_reason.name.lower() if self.failure is None else exit_reason(self.failure)
            metrics = {**self._metrics(rollout_cache), "truncated": rollout_cache.truncated}
            status = "Finished" if self.failure is None else "Failed"
            self.episode.finish(EpisodeResult(status, score, None, reason, metrics), rewards)
        return self.episode

    def _end_session(self, reason: str, outcome: str = "Failed") -> None:
        """Let go of the episode's session, and end it unless it has ended."""
        episode, self.episode = self.episode, None
        if episode is not None:
            episode.fail(reason, outcome)

    def next_episode(self) -> bool:
        """Wait for the queue to give out an episode. The session of the one before has ended then."""
        self._end_session("the next episode began before this one was laid out")
        self.episode_id = None
        return super().next_episode()

    def _new_cache(self) -> RolloutCache:
        return RolloutCache(self.env_config["env_id"], self.env_config["group_id"], self.env_config["tag"])

    def _current(self) -> RolloutCache:
        if self.rollout_cache is None:
            raise RuntimeError("no episode runs: reset() begins one")
        return self.rollout_cache

    def _timed(self, name: str, call: Callable[[], _T]) -> _T:
        begun = time.monotonic()
        try:
            return call()
        finally:
            self.log_stats[name].append(time.monotonic() - begun)
