"""One sample in one session: start the session, run the loop, record rewards and metrics, and end the session.

The session always ends: as Failed with the reason if the loop raised or was cancelled, as Timeout after its time
limit, and as NoData if the model was never called.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tokengrove.client import AsyncSession
from tokengrove.client.exit_reason import exit_reason
from tokengrove.client.options import EndOptions, SessionOptions
from tokengrove.rollout.agent_call import contained
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.config import Config
from tokengrove.rollout.episode import Episode, Overdue
from tokengrove.rollout.failure_log import FailedEpisode
from tokengrove.verl.batches import check_lengths
from tokengrove.verl.experts import add_experts
from tokengrove.verl.loop_base import AgentLoopBase, accepted, run_loop
from tokengrove.verl.outputs import AgentLoopOutput, TokenOutput
from tokengrove.verl.registry import resolve
from tokengrove.verl.server_manager import AsyncLLMServerManager
from tokengrove.verl.servers import Server
from tokengrove.verl.settings import DictConfigWrap
from tokengrove.verl.tracing import rollout_trace_attr
from tokengrove.verl.vision import add_sample

_LONGEST_NAME = 80


class AgentLoopFailed(RuntimeError):
    """A sample failed; the message contains the sample, its session and the reason. `row`: its index in the batch.
    `failed`: the same information for the log of failures.
    """

    def __init__(self, message: str, row: int | None = None, failed: FailedEpisode | None = None) -> None:
        super().__init__(message)
        self.row, self.failed = row, failed


@dataclass(frozen=True, slots=True)
class LoopOptions:
    """The settings that all samples of a run share. Times are in seconds; None: no limit."""

    config: Config
    tokenizer: Any = None
    tools: Any = None
    sample_timeout_s: float | None = None
    start_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class SampleRun:
    """A sample of a batch, ready to run. `trajectory`: its step, sample and rollout numbers."""

    options: LoopOptions
    row: int
    sample: Mapping[str, Any]
    sampling_params: dict[str, Any]
    trajectory: Mapping[str, Any]
    group_id: str | None
    group_size: int
    loop_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the loop's class, in addition to those of its entry in the registry."""
    seed: int | None = None
    """The seed of sampling in the session; each turn derives its own."""
    spans: bool = True
    """False: this sample is not traced; others of the step are."""

    async def run(self, server: Server) -> AgentLoopOutput:
        """Run the loop in a session of `server`. Raises AgentLoopFailed, caused by the original error."""
        episode: Episode | None = None
        try:
            resolve(self._agent)  # raises before a session is started for an unknown loop
            options, within_s = self._session_options(), self.options.start_timeout_s
            episode = await Episode.start(server.control, self._task_id, options, delivery="runner", within_s=within_s)
            return await self._played(server, episode)
        except Exception as error:
            at = "" if episode is None else f", session {episode.session_id!r}"
            uid = f", uid {self.sample['uid']!r}" if "uid" in self.sample else ""
            message = f"sample {self.row} (agent {self._agent!r}{uid}{at}) failed: {exit_reason(error)}"
            failed = FailedEpisode.by(error, self._place, None if episode is None else episode.session_id)
            raise AgentLoopFailed(message, self.row, failed) from error

    def judged(self, output: AgentLoopOutput) -> FailedEpisode | None:
        """The failure of a sample whose loop returned no sampled token; None: it has not failed."""
        if any(output.response_mask):
            return None
        message = "no token of the response was sampled, so there is nothing to train"
        return FailedEpisode("NothingSampled", message, self._place, output.session_id)

    async def _played(self, server: Server, episode: Episode) -> AgentLoopOutput:
        limit_s = self.options.sample_timeout_s
        told = f"it took longer than {limit_s} s (sample_timeout_s)"
        try:
            output, called = await episode.play(self.output(server, episode.session), limit_s, told)
            await to_the_end(_end(episode, output, called=called))
        except Overdue as overdue:
            late = TimeoutError(told)
            await to_the_end(episode.fail(late, "Timeout"))
            raise late from overdue.__cause__
        except BaseException as error:
            await to_the_end(episode.fail(error))
            raise
        await add_sample(output, server.control, episode.session_id)
        if self._replays_experts and any(output.response_mask):
            await add_experts(output, server.control, episode.session_id)
        return output

    async def output(self, server: Server, session: AsyncSession) -> tuple[AgentLoopOutput, bool]:
        """Run the loop in a session that the caller has started and will end.

        Returns the completed output of the loop, and whether it called the model. Raises the errors of the loop.
        """
        try:
            manager = AsyncLLMServerManager(self.options.config, server.of_agent(session))
            output = await self._loop(server, session, manager)
            output.session_id = session.session_id
            _complete(output, manager.answers, self.options.config.actor_rollout_ref.rollout.calculate_log_probs)
            return output, bool(manager.answers)
        finally:
            server.ended(session)

    async def _loop(self, server: Server, session: AsyncSession, manager: AsyncLLMServerManager) -> AgentLoopOutput:
        config = self.options.config
        loop_class, kwargs = resolve(self._agent)
        tokenizer = self.options.tokenizer
        if tokenizer is None:
            tokenizer = server.tokenizer(session)
            if _has_init_class(loop_class):
                await asyncio.to_thread(tokenizer.prepare)  # init_class may use it, and must not block the event loop
        given = {
            "trainer_config": DictConfigWrap(config),
            "config": config,
            "server_manager": manager,
            "tokenizer": tokenizer,
            "processor": None,
            "hf_model_type": None,
            "dataset_cls": None,
            "data_config": DictConfigWrap(config.data),
            "tools": self.options.tools,
        }
        taken = accepted(loop_class, given)
        if "trainer_config" in taken:
            taken.pop("config", None)  # a class with **kwargs accepts both; one is enough
        with contained(), rollout_trace_attr(name="agent_loop", **self.trajectory, **self._traced):
            loop = loop_class(**{**taken, **kwargs, **self.loop_arguments})
            output = await run_loop(loop, self.sampling_params, self.sample)
        rollout = config.actor_rollout_ref.rollout
        check_lengths(output, rollout.prompt_length, rollout.response_length)
        return output

    @property
    def _traced(self) -> dict[str, Any]:
        """How the sample is traced. `backend: null` turns spans off; if it is missing, environment variables decide."""
        trace, trainer = self.options.config.actor_rollout_ref.rollout.trace, self.options.config.trainer
        return {
            "spans": self.spans and ("backend" not in trace.given() or trace.backend is not None),
            "token2text": trace.token2text,
            "project": trace.project_name or trainer.project_name,
            "experiment": trace.experiment_name or trainer.experiment_name,
        }

    @property
    def _replays_experts(self) -> bool:
        return bool(self.options.config.actor_rollout_ref.rollout.enable_rollout_routing_replay)

    @property
    def _agent(self) -> Any:
        agent: Any = self.sample.get("agent_name")
        return self.options.config.actor_rollout_ref.rollout.agent.default_agent_loop if agent is None else agent

    @property
    def _place(self) -> str:
        return f"{self._task_id}, sample {self.row}, agent {self._agent!r}"

    @property
    def _task_id(self) -> str:
        name = re.sub(r"[^\w@+-]+", "-", str(self.trajectory["sample_index"]), flags=re.ASCII).strip("-")
        return f"verl-{name}"[:_LONGEST_NAME]

    def _session_options(self) -> SessionOptions:
        trainer = self.options.config.trainer
        told = {
            **self.trajectory,
            "project": trainer.project_name,
            "experiment": trainer.experiment_name,
            "agent_name": str(self._agent),
            **{name: self.sample[name] for name in ("uid", "data_source") if name in self.sample},
        }
        options: SessionOptions = {
            "session_id": f"{self._task_id}-{secrets.token_hex(6)}",
            "metadata": {name: as_json(value) for name, value in told.items() if value is not None},
            "grant_capacity": True,
        }
        if self._replays_experts:
            options["replay"] = ["experts"]
        if self.seed is not None:
            options["sampling"] = {"seed": self.seed}
        if self.group_id is not None:
            options["group_id"], options["group_size"] = self.group_id, self.group_size
        return options


def _has_init_class(loop_class: type) -> bool:
    """Whether a class defines `init_class`, or inherits one from a class other than AgentLoopBase."""
    return any("init_class" in vars(each) for each in loop_class.__mro__ if each is not AgentLoopBase)


def _complete(output: AgentLoopOutput, answers: Sequence[TokenOutput], wants_logprobs: bool) -> None:
    """Add what the loop did not return: the weight versions of its answers, and the logprobs of their ids."""
    versions = [version for answer in answers for version in answer.versions]
    if versions and output.extra_fields.get("max_global_steps") is None:
        output.extra_fields |= {"min_global_steps": min(versions), "max_global_steps": max(versions)}
    if output.response_logprobs is not None or not wants_logprobs:
        return
    sampled = [each for answer in answers for each in zip(answer, answer.log_probs or [], strict=False)]
    places = [at for at, bit in enumerate(output.response_mask) if bit]
    if [output.response_ids[at] for at in places] != [token for token, _ in sampled[: len(places)]]:
        return  # the loop left out an answer, or an answer has no logprobs
    logprobs = [0.0] * len(output.response_ids)
    for at, (_, logprob) in zip(places, sampled, strict=False):
        logprobs[at] = logprob
    output.response_logprobs = logprobs


async def set_named_rewards(session: AsyncSession, output: AgentLoopOutput) -> None:
    """Set the rewards that a loop named, in addition to the reward of the session."""
    for name, rewards in output.named_rewards.items():
        for interaction_id, reward in rewards.items():
            await session.set_reward(reward, interaction_id=interaction_id, name=name)


def ending(output: AgentLoopOutput, *, called: bool) -> EndOptions:
    """The options of the end of a session whose loop returned `output`, without the reward."""
    metrics = {**output.metrics.model_dump(), "num_turns": output.num_turns}
    metrics |= {
        name: output.extra_fields[name] for name in ("tool_rewards", "turn_scores") if output.extra_fields.get(name)
    }
    return {
        "outcome": "Finished" if called else "NoData",
        "exit_reason": output.stop_reason or "",
        "metrics": as_json(metrics),
    }


async def _end(episode: Episode, output: AgentLoopOutput, *, called: bool) -> None:
    await set_named_rewards(episode.session, output)
    options = ending(output, called=called)
    if output.reward_score is not None and called:
        options["reward"] = float(output.reward_score)
    await episode.end(**options)


def as_json(value: Any) -> Any:
    """A value that JSON can encode: arrays become lists, and other unsupported values and non-finite floats text."""
    if isinstance(value, np.generic | np.ndarray):
        return as_json(value.tolist())
    if isinstance(value, Mapping):
        return {str(name): as_json(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, float) and not np.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
