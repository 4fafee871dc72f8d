"""Plays the episodes of one environment with a runner, which calls the model through the session of its episode."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, suppress
from typing import Any

from tokengrove.errors import InvalidRequest, KeyInUse, ProxyError
from tokengrove.roll.config.class_names import resolve
from tokengrove.roll.managers.base_env_manager import BaseEnvManager, say_once
from tokengrove.roll.managers.episode_session import EpisodeSession
from tokengrove.roll.managers.rollouts import rollout_of
from tokengrove.roll.managers.runner_slot import RunnerSlot
from tokengrove.roll.runners.played import earned
from tokengrove.roll.values.data_proto import DataProto
from tokengrove.roll.values.episode_result import EpisodeResult, InvalidResult, check_scores, not_a_result
from tokengrove.roll.values.score_metric import BINARY, SCORE_METRIC, ScoreMetric, metric_value

_GRACE_S = 1.0
"""Seconds beyond its limit that a runner may take to end by itself, with a result of its own."""
_STOP_S = 5.0
"""Seconds that a stopped manager waits for its runner, whose session has ended."""


class ProxyEnvManager(BaseEnvManager):
    """The manager of agents that are runners: `env_config["agent_runner_cls"]`, a path or a class.

    One runner plays all episodes, in its own thread; `setup` is called before the first and `teardown` after the last.
    It has one address, which belongs to the session of the running episode. Whatever `run_job` returns or raises, the
    session is ended, and what was sampled and earned is put into the queue. NoData ends the loop and puts None.

    The sampling of `generating_args` overrides the agent's, which may only ask for fewer tokens. If the server does not
    allow chosen keys, the runner gets the address of each session before its episode, as `base_url` and `api_key`.

    Settings of `env_config.config`, all optional:

    - `trajectory_mode`: `traj`, a row for each branch, or `step`, a row for each turn
    - `reward_granularity`: the runner's metric that replaces the runner's `score` as the score of an episode, such as
      `pass_rate`; default: none. An episode without that metric has its `score`. `binary`: the score itself, unless a
      metric has this name. Step scores are not changed.
    - `tool_call_parser`: a name of `--tool-parser`; default: the model's
    - `enable_thinking`: of the chat template; default false, as in ROLL
    - `enable_fork`: true, the default: a rewritten conversation begins a new row, so that every sampled token is
      trained; false: it continues its row, and sampled tokens that it no longer contains are not trained
    - `episode_timeout`, `task_timeout_sec`: seconds after which the episode is a Timeout, and a runner that hangs is
      replaced by another with its own key. A runner whose class has `enforces_task_timeout` applies the latter itself.

    Raises InvalidRequest for a configuration without a runner, and for an unknown `trajectory_mode`.
    """

    def __init__(
        self,
        worker_config: Any,
        pipeline_config: Any,
        env_config: Any,
        tokenizer: Any,
        generate_scheduler: Any,
        output_queue: Any,
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
        self.logger = logging.getLogger(__name__)
        env_config = self.env_config
        config = env_config.get("config") or {}
        self.trajectory_mode = str(config.get("trajectory_mode") or "traj")
        self.reward_granularity: str | None = config.get("reward_granularity")
        self.tool_call_parser: str | None = config.get("tool_call_parser")
        self.episode: EpisodeSession | None = None
        self._config = config
        self._woken = threading.Event()
        self._runner_class = _runner_class(env_config.get("agent_runner_cls"))
        if self.trajectory_mode not in ("traj", "step"):
            raise InvalidRequest(
                f"trajectory_mode is {self.trajectory_mode!r}; it must be traj or step", param="trajectory_mode"
            )
        self._renew_slot()

    @classmethod
    def session_options(cls, env_config: Any, worker_config: Any) -> dict[str, Any]:
        """The options that make the session answer like ROLL's proxy, whatever the agent requests.

        ROLL ends an answer after its first tool call with stop strings, which engines search where calls are parsed.
        """
        config = env_config.get("config") or {}
        options: dict[str, Any] = {
            "sampling_policy": "override",
            "chat_template_kwargs": {"enable_thinking": bool(config.get("enable_thinking", False))},
        }
        if (tool_call_parser := config.get("tool_call_parser")) is not None:
            options["tool_parser"] = tool_call_parser
        stops = getattr(getattr(worker_config, "generating_args", None), "stop_strings", None) or ()
        if any(str(stop).strip() == "</tool_call>" for stop in stops):
            options["parallel_tool_calls"] = False
        return options

    def run_rollout_loop(self, data: DataProto) -> None:
        """Play episodes until the queue has no more, the runner has no data, or `stop`; at the end put None.

        Raises ValueError for data without a seed, the exceptions of `formulate_rollouts`, and the errors of the server
        if a session cannot start or end.
        """
        self.begin(data)
        if self._slot.is_abandoned:
            self._renew_slot()
        try:
            self._slot.setup()
            while self.next_episode():
                rollout = self._play_episode()
                if rollout is None:
                    break
                self.put(rollout)
            self.put(None)
        finally:
            self.running = False
            self._slot.teardown()

    def stop(self) -> None:
        """Play no more episodes. The session of the running episode ends, and nothing is put for it."""
        super().stop()
        if (episode := self.episode) is not None:
            with suppress(ProxyError):
                episode.fail("the manager was stopped", within_s=0.0)
        self._slot.cancel()
        self._woken.set()

    def formulate_rollouts(self, result: dict[str, Any]) -> DataProto:
        """The rows of the episode that has ended. `result` is the runner's, from `EpisodeResult.to_dict`.

        Raises InvalidRequest if no episode was played, for example in a loop that calls the runner itself.
        """
        if self.episode is None:
            raise InvalidRequest(
                "no episode was played: the loop of ProxyEnvManager starts the session of an episode. Override "
                "formulate_rollouts or the runner's run_job instead of run_rollout_loop, or a direct manager's loop"
            )
        return rollout_of(
            self.episode,
            mode=self.trajectory_mode,
            sequence_length=self.pipeline_config.sequence_length,
            pad_token_id=int(getattr(self.tokenizer, "pad_token_id", None) or 0),
            score=self._select_episode_score(result),
            discounted=self.is_discounted,
            drift="mask" if self._config.get("enable_fork") is False else "fork",
        )

    def _select_episode_score(self, result: dict[str, Any]) -> float:
        """The number that `reward_granularity` names, else `score`."""
        named = None if self.reward_granularity is None else metric_value(result, self.reward_granularity)
        return float(result.get("score", 0.0)) if named is None else named

    def _tell_score(self, result: EpisodeResult) -> None:
        """Log once which metric replaces the runner's score, and log each episode without it."""
        name, tag = self.reward_granularity, self.env_config["tag"]
        if name is None or result.status == "NoData":
            return
        if metric_value(result.metrics, name) is not None:
            say_once(f"{tag}: the metric {name!r} is the score of an episode, instead of the runner's", self.logger)
        elif name == BINARY:
            say_once(f"{tag}: reward_granularity {BINARY!r}: the score of an episode is the runner's", self.logger)
        elif self.episode is not None:
            where = f"session {self.episode.session.session_id}"
            self.logger.warning("%s: no metric %r, so the runner's score %s counts", where, name, result.score)

    def _play_episode(self) -> DataProto | None:
        """Play the next episode of the queue; None if there is no rollout, and no further episode."""
        try:
            self.episode = self._start()
        except ProxyError:
            if not self.running:
                return None
            raise
        try:
            result = self._result()
            if not self.running:
                self.episode.fail("the manager was stopped")
                return None
            self._tell_score(result)
            self.episode.finish(result, score=self._select_episode_score(result.to_dict()))
            if result.status == "NoData":
                return None
            with self.thread_lock:
                rollout = self.formulate_rollouts(result.to_dict())
            if (name := self.reward_granularity) is not None:
                metric = ScoreMetric.of(self.env_config["tag"], name, result.metrics, result.status)
                rollout.meta_info[SCORE_METRIC] = metric
            return self.episode.told_in(rollout)
        except BaseException as error:
            with suppress(ProxyError):
                self.episode.fail(error)
            raise

    def _start(self) -> EpisodeSession:
        """Start the session of the episode, with the key of the slot if the server allows chosen keys."""
        try:
            episode = self._started(self._slot.chosen_key)
        except InvalidRequest as error:
            if error.param != "api_key" or isinstance(error, KeyInUse) or self._slot.chosen_key is None:
                raise
            self.logger.info("%s: each episode has its own address instead", error)
            self._slot.chosen_key = None
            episode = self._started(None)
        if self._slot.chosen_key is None:
            self._slot.address(episode.base_url, episode.api_key)
        return episode

    def _started(self, api_key: str | None) -> EpisodeSession:
        assert self.episode_id is not None and self.group_seed is not None
        return EpisodeSession.start(
            self.generate_scheduler,
            env_config=self.env_config,
            worker_config=self.worker_config,
            pipeline_config=self.pipeline_config,
            mode=self.mode,
            episode_id=self.episode_id,
            seed=self.episode_seed,
            group_seed=self.group_seed,
            step=self.start_step,
            api_key=api_key,
            may_wait=lambda: self.running,
            **self.session_options(self.env_config, self.worker_config),
        )

    def _result(self) -> EpisodeResult:
        """The runner's result of the episode; if it hangs, a Timeout, or a failure after `stop`."""
        woken = self._woken = threading.Event()
        running, limit_s = self._slot.play(self.episode_seed), self._limit_s()
        running.add_done_callback(lambda _: woken.set())
        if self.running:
            woken.wait(None if limit_s is None else limit_s + _GRACE_S)
        if not self.running and not running.done():
            self._wait(running, _STOP_S)
        if running.done():
            return _checked(running.result())
        scores = earned(self.agent_runner)
        self._slot.abandon()
        if self.running:
            self._renew_slot()
            self._slot.setup()
        return EpisodeResult("Timeout", math.fsum(scores), scores, f"run_job took longer than {limit_s} s")

    def _wait(self, running: Future[EpisodeResult], within_s: float) -> None:
        with suppress(TimeoutError):
            running.exception(within_s)

    def _limit_s(self) -> float | None:
        """The time limit of an episode in seconds; None: no limit."""
        names = ["episode_timeout"]
        if not getattr(self.agent_runner, "enforces_task_timeout", False):
            names.append("task_timeout_sec")
        given = [settings.get(name) for name in names for settings in (self.env_config, self._config)]
        return next((float(limit_s) for limit_s in given if limit_s is not None), None)

    def _renew_slot(self) -> None:
        """Create a runner with its own key: requests of the previous runner no longer reach a session."""
        self._slot = RunnerSlot(
            self._runner_class, self.generate_scheduler, self.env_config, self.worker_config, self.thread_lock
        )
        self.agent_runner = self._slot.runner


def _runner_class(path: Any) -> Any:
    if path is None:
        raise InvalidRequest(
            "agent_runner_cls is null: ProxyEnvManager plays with a runner; name one, or use the env_manager_cls "
            "TrajEnvManager or StepEnvManager, which play without",
            param="agent_runner_cls",
        )
    return resolve(path, "agent_runner_cls")


def _checked(result: Any) -> EpisodeResult:
    """The result with numeric scores; for an invalid result a failure that describes it."""
    try:
        scores = [float(score) for score in getattr(result, "step_scores", None) or ()]
        status = str(getattr(result.status, "value", result.status))
        checked = EpisodeResult(status, float(result.score), scores, result.agent_exit_reason, result.metrics)
    except (AttributeError, TypeError, ValueError) as error:
        return _failed(not_a_result(result, error))
    try:
        check_scores(checked)
    except InvalidResult as error:
        return _failed(error.with_traceback(None), checked.metrics)
    checked.error = getattr(result, "error", None)
    return checked


def _failed(error: Exception, metrics: Mapping[str, Any] | None = None) -> EpisodeResult:
    failed = EpisodeResult("Failed", 0.0, agent_exit_reason=str(error), metrics=metrics)
    failed.error = error
    return failed
