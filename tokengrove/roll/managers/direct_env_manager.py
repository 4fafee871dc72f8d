"""The loop of managers that play their environment themselves, with one session for each episode.

Whatever happens in an episode, its session ends once, its rollout contains what was sampled and earned, and the next
episode is played. The tokens of a decision are those that the engine received and sampled. The history contains them,
the session records them, and `formulate_rollouts` exports them, so the three cannot differ.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, ClassVar, TypeVar

import numpy as np

from tokengrove.client import Session
from tokengrove.client.exit_reason import exit_reason
from tokengrove.errors import InvalidRequest, ProxyError
from tokengrove.roll.managers.base_env_manager import BaseEnvManager, say_once
from tokengrove.roll.managers.episode_session import EpisodeSession
from tokengrove.roll.managers.history import Layout, amended, earned
from tokengrove.roll.managers.live_session import LiveSession
from tokengrove.roll.managers.rollout_cache import RolloutCache
from tokengrove.roll.managers.rollouts import rollout_of
from tokengrove.roll.values import (
    DataProto,
    EpisodeResult,
    EpisodeStopReason,
    GenerateStopReason,
    aggregate_metrics,
    as_section,
)
from tokengrove.rollout.server_tokenizer import ServerTokenizer

_T = TypeVar("_T")
_MOST_ABORTS = 3


class DirectEnvManager(BaseEnvManager, ABC):
    """Plays episodes with the methods `reset`, `make_decision` and `step` of a subclass, and returns their samples.

    The arguments are those of `BaseEnvManager`. If `tokenizer` is None, `self.tokenizer` is the server's, over HTTP,
    with the methods of a tokenizer of transformers.

    `rollout_cache` is the running episode, `episode` its session, and `failure` the exception that ended it.
    `log_stats` has the seconds of its parts.
    """

    layout: ClassVar[Layout] = "concat"
    """The layout of the export: one sample for each conversation, or one for each step."""
    reset_backoff_s: ClassVar[float] = 10.0
    """Seconds by which the pause grows after each consecutive failed `reset`."""

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
        self.logger = logging.getLogger(__name__)
        self.rollout_cache: RolloutCache | None = None
        self.episode: EpisodeSession | None = None
        self.failure: BaseException | None = None
        self.tools: list[dict[str, Any]] = []
        self.stop_reason = EpisodeStopReason.FINISH
        self.log_stats: dict[str, list[float]] = defaultdict(list)
        self._stopped = threading.Event()
        self._failed_resets = 0
        self._started_for: tuple[int | None, int | None] | None = None  # (group seed, episode) of the latest session
        self._live = LiveSession(generate_scheduler, self._running_session)
        if self.tokenizer is None:
            self.tokenizer = ServerTokenizer(self._live)
        if (self.env_config.get("config") or {}).get("reward_granularity") is not None:
            tag = self.env_config["tag"]
            say_once(f"{tag}: reward_granularity has no effect without a runner: a score is the sum of the rewards")

    @classmethod
    def session_options(cls, env_config: Any, worker_config: Any) -> dict[str, Any]:
        return {"sampling_policy": "default"}  # an overridden make_decision may choose the sampling

    @abstractmethod
    def reset(self) -> RolloutCache | None:
        """Begin the next episode of `next_episode`. None: there is none, or nothing to play."""

    @abstractmethod
    def make_decision(self, rollout_cache: RolloutCache) -> DataProto:
        """Ask the model for the next answer: `batch["responses"]` [1, R] and `meta_info["stop_reason"]`."""

    @abstractmethod
    def step(self, llm_output: DataProto) -> RolloutCache:
        """Act on a decision. The episode ends if the returned cache is `terminated` or `truncated`."""

    def run_rollout_loop(self, data: DataProto) -> None:
        """Play episodes until the queue has no more; `data.meta_info["seed"]` is the seed of the run.

        An exception of the environment or of a model call fails the episode: its session ends as Failed, its rollout
        contains what was sampled and earned before, and the next episode begins. Raises errors that prevent an episode
        from being recorded: of the queue, of a session's start or export, and of an overridden `formulate_rollouts`.
        Raises InvalidRequest for an `agent_template` that cannot be rendered.
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
        """Play one episode and put its rollout. Return False if there are no more."""
        rollout_cache: RolloutCache | None = None
        try:
            rollout_cache = self._timed("reset_time", self.reset)
            if rollout_cache is None:
                return False
            self._failed_resets = 0
            rollout_cache = self._play(rollout_cache)
        except (Exception, SystemExit, asyncio.CancelledError) as error:  # threads are not cancelled
            if self.running:
                self._fail(error)
            if isinstance(error, InvalidRequest) and error.param == "agent_template":
                self._end_session(exit_reason(error))
                raise  # it affects every episode
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
        """Act on a decision: one step of the environment, or the end of the episode if the prompt leaves no room."""
        if stop_reason is GenerateStopReason.FINISH:
            return self.step(lm_output)
        self.stop_reason = EpisodeStopReason.MAX_LENGTH
        rollout_cache.truncated = True
        return rollout_cache

    def _fail(self, error: BaseException) -> None:
        """Record that the episode has failed. Raises the error if there is no session to record it."""
        if self.episode is None:
            raise error
        self.failure = error

    def _formulated(self, rollout_cache: RolloutCache) -> DataProto:
        """The rollout, with the names that the trainer groups by, after the session has ended."""
        try:
            rollout = self.formulate_rollouts(rollout_cache)
        except Exception:
            if self.failure is None:
                raise
            self.logger.exception("formulate_rollouts failed on the history of the failed episode")
            rollout = DirectEnvManager.formulate_rollouts(self, rollout_cache)
        episode = self._ended(rollout_cache)
        names = {"traj_group_id": episode.traj_group_id, "traj_id": f"{episode.traj_group_id}_{episode.env_id}"}
        for name, value in names.items():
            rollout.non_tensor_batch.setdefault(name, np.array([value] * len(rollout), dtype=object))
        rollout.meta_info.setdefault("session_id", episode.session.session_id)
        return episode.told_in(rollout)

    def _wait_after_failed_reset(self) -> None:
        self._failed_resets += 1
        self._stopped.wait(min(3600.0, self.reset_backoff_s * self._failed_resets))

    def stop(self) -> None:
        """Play no more episodes, and end the running one: its later requests are rejected."""
        super().stop()
        self._stopped.set()
        if (episode := self.episode) is not None:
            with suppress(ProxyError):  # the loop also ends it
                episode.fail("the manager was stopped", within_s=0.0)

    def formulate_rollouts(self, rollout_cache: RolloutCache) -> DataProto:
        """End the episode's session with the rewards of the history, and return its samples.

        An unanswered last observation is removed from the history. An episode without an answer has one row of padding,
        and `drop_flag` in `meta_info` if its environment failed to start.
        """
        if rollout_cache.history and not {"response_ids", "reward"} & rollout_cache.history[-1].keys():
            rollout_cache.history.pop()
        episode = self._ended(rollout_cache)
        rollout = rollout_of(
            episode,
            mode="traj" if self.layout == "concat" else "step",
            sequence_length=self.pipeline_config.sequence_length,
            pad_token_id=getattr(self.tokenizer, "pad_token_id", None) or 0,
            score=earned(rollout_cache.history)[1],
            discounted=self.is_discounted,
            amended=lambda samples: amended(samples, rollout_cache.history, episode, self.layout, self.tools),
        )
        rollout.meta_info["metrics"] |= {
            f"env/{rollout_cache.tag}/{name}": value for name, value in self._metrics(rollout_cache).items()
        }
        if self.failure is not None and not rollout_cache.history:
            rollout.meta_info["drop_flag"] = True
        return rollout

    def _metrics(self, rollout_cache: RolloutCache) -> dict[str, float]:
        """The environment's metrics, aggregated by its `metrics_agg_mode`, and the number of steps."""
        history = rollout_cache.history
        modes = history[-1].get("metrics_agg_mode") or {} if history else {}
        measured = aggregate_metrics([entry.get("metrics") or {} for entry in history], modes)
        return {**measured, "num_actions": rollout_cache.step}

    def _running_session(self) -> Session | None:
        """The session of the running episode, started on first use; None without an episode or after its end."""
        group_seed, episode_id = self.group_seed, self.episode_id
        is_new = self.episode is None and (group_seed, episode_id) != self._started_for
        if is_new and group_seed is not None and episode_id is not None:
            self._live.answers.clear()
            self.episode = EpisodeSession.start(
                self.generate_scheduler,
                env_config=self.env_config,
                worker_config=self.worker_config,
                pipeline_config=self.pipeline_config,
                mode=self.mode,
                episode_id=episode_id,
                seed=group_seed + episode_id,
                group_seed=group_seed,
                step=self.start_step,
                may_wait=lambda: self.running,
                **self.session_options(self.env_config, self.worker_config),
            )
            self._started_for = group_seed, episode_id
        return None if self.episode is None or self.episode.outcome is not None else self.episode.session

    def _ended(self, rollout_cache: RolloutCache) -> EpisodeSession:
        """The episode's session, after its end with outcome, rewards and metrics."""
        self._running_session()
        if self.episode is None:
            raise RuntimeError("no episode is running: reset() begins one")
        if self.episode.outcome is None:
            self._live.name_turns(rollout_cache.history)
            rewards, score = earned(rollout_cache.history)
            reason = self.stop_reason.name.lower() if self.failure is None else exit_reason(self.failure)
            metrics = {**self._metrics(rollout_cache), "truncated": rollout_cache.truncated}
            result = EpisodeResult("Finished" if self.failure is None else "Failed", score, None, reason, metrics)
            result.error = self.failure
            self.episode.finish(result, rewards)
        return self.episode

    def _end_session(self, reason: str, outcome: str = "Failed") -> None:
        """Release the episode's session, and end it unless it has ended."""
        episode, self.episode = self.episode, None
        if episode is not None:
            episode.fail(reason, outcome)

    def next_episode(self) -> bool:
        """Wait for an episode of the queue, after ending the session of the previous one."""
        self._end_session("the next episode began before this one was formulated")
        self.episode_id = self._started_for = None
        return super().next_episode()

    def _new_cache(self) -> RolloutCache:
        return RolloutCache(self.env_config["env_id"], self.env_config["group_id"], self.env_config["tag"])

    def _current(self) -> RolloutCache:
        if self.rollout_cache is None:
            raise RuntimeError("no episode is running: reset() begins one")
        return self.rollout_cache

    def _timed(self, name: str, call: Callable[[], _T]) -> _T:
        begun = time.monotonic()
        try:
            return call()
        finally:
            self.log_stats[name].append(time.monotonic() - begun)
