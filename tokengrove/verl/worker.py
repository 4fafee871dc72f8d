"""Runs a batch of samples in agent loops, each in its own session."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Literal, TypeGuard
from uuid import uuid4

from tokengrove.client.adapters.parts import objects
from tokengrove.client.adapters.verl import VerlBatch
from tokengrove.errors import InvalidRequest, UnsupportedParameter
from tokengrove.rollout.config import Config
from tokengrove.rollout.failure_log import FailureLog
from tokengrove.rollout.scheduler import Scheduler
from tokengrove.verl.batches import Prompts, as_given, padded_outputs
from tokengrove.verl.outputs import AgentLoopOutput
from tokengrove.verl.registry import register_file
from tokengrove.verl.sample_run import AgentLoopFailed, LoopOptions, SampleRun
from tokengrove.verl.server_manager import AsyncLLMServerManager, Placement
from tokengrove.verl.servers import Server, addresses, opened
from tokengrove.verl.settings import GREEDY, ToolListWrap, check_settings, sampling_of, trainer_config
from tokengrove.verl.tools import load_all_tools

OnFailure = Literal["raise", "drop"]


async def get_trajectory_info(step: int, index: Sequence[Any], validate: bool) -> list[dict[str, Any]]:
    """The `step`, `sample_index`, `rollout_n` and `validate` of each sample. Adjacent samples with equal indexes are
    rollouts of one sample, numbered from 0.
    """
    found: list[dict[str, Any]] = []
    for at, each in enumerate(index):
        again = at > 0 and index[at - 1] == each
        rollout = found[-1]["rollout_n"] + 1 if again else 0
        found.append({"step": step, "sample_index": each, "rollout_n": rollout, "validate": validate})
    return found


class AgentLoopWorker:
    """Runs samples in agent loops. `server_handles` (or `llm_client`): one or more addresses or clients of servers, or
    a server manager.

    A new session goes to the server with the fewest running samples of the batch. With `full_determinism`, the sample
    alone decides. If `_choose_server` of the server manager is overridden, it decides.

    `admin_key` is used for addresses. `tokenizer`: a tokenizer of transformers for the loops; None: the server's.
    `tools`: the tools of all samples, instead of the files that the configuration names. `max_concurrency`: samples
    that run at once. `sample_timeout_s`: seconds that a sample may take; None: no limit. `start_timeout_s`: seconds to
    wait for a place on a full server.

    `on_failure`: with `raise`, a failure ends the other samples, whose sessions also end as Failed, and AgentLoopFailed
    is raised; with `drop`, failed samples are left out of the batch and listed in `meta_info["failed"]`. After
    `max_failed_episodes` failed samples in a row, also across batches, the batch ends with TooManyFailedEpisodes
    (default: the limit in `actor_rollout_ref.rollout.agent`, else three times the largest group; -1: no limit).
    `pad_token_id`: default: the tokenizer's, or 0.

    `teacher_client` and `reward_loop_worker_handles` must be None: they are actors of verl's trainer. Here, a loop
    returns its reward. `actor_rollout_ref.rollout.agent.num_workers` has no effect: loops mostly wait for the model, so
    one event loop serves all of them.
    """

    def __init__(
        self,
        config: object,
        server_handles: Any = None,
        teacher_client: object = None,
        reward_loop_worker_handles: object = None,
        *,
        llm_client: Any = None,
        admin_key: str | None = None,
        tokenizer: Any = None,
        tools: Any = None,
        max_concurrency: int = 256,
        sample_timeout_s: float | None = None,
        start_timeout_s: float = 600.0,
        on_failure: OnFailure = "raise",
        max_failed_episodes: int | None = None,
        pad_token_id: int | None = None,
    ) -> None:
        for name, given in (
            ("teacher_client", teacher_client),
            ("reward_loop_worker_handles", reward_loop_worker_handles),
        ):
            if given is not None:
                raise UnsupportedParameter(f"'{name}' must be None: it is an actor of verl's trainer", param=name)
        if on_failure not in ("raise", "drop"):
            raise InvalidRequest(f"'on_failure' must be 'raise' or 'drop', not {on_failure!r}", param="on_failure")
        if max_concurrency < 1:
            raise InvalidRequest("'max_concurrency' must be at least 1", param="max_concurrency")
        self.config = trainer_config(config)
        check_settings(self.config)
        self.rollout_config = self.config.actor_rollout_ref.rollout
        if self.config.select("actor_rollout_ref.model.custom_chat_template") is not None:
            message = (
                "the server renders with the chat template in the folder of its --model: save yours there as "
                "chat_template.jinja, and set this to null"
            )
            raise UnsupportedParameter(message, param="actor_rollout_ref.model.custom_chat_template")
        handles = server_handles if llm_client is None else llm_client
        self.addresses = addresses(handles, admin_key)
        self._chooser = handles if _chooses(handles) else None
        if (path := self.rollout_config.agent.agent_loop_config_path) is not None:
            register_file(path)
        most = self.rollout_config.agent.max_failed_episodes if max_failed_episodes is None else max_failed_episodes
        self.failures = FailureLog(most, of="a sample")
        self._options = LoopOptions(self.config, tokenizer, self._tools(tools), sample_timeout_s, start_timeout_s)
        self._concurrency, self._on_failure = max_concurrency, on_failure
        padding = getattr(tokenizer, "pad_token_id", None) if pad_token_id is None else pad_token_id
        self._pad_token_id = 0 if padding is None else int(padding)

    def _tools(self, given: Any) -> ToolListWrap | None:
        """The tools of all samples, created once; None: there are none."""
        paths = self.rollout_config.multi_turn.tool_config_path, self.rollout_config.multi_turn.function_tool_path
        if given is None and not any(paths):
            return None
        return ToolListWrap(load_all_tools(*paths) if given is None else getattr(given, "tools", given))

    async def generate_sequences(self, batch: Any) -> Any:
        """Run the samples of a batch, in any form that `Prompts.of` reads; return the padded outputs
        (`padded_outputs`).

        A DataProto returns a DataProto, anything else a VerlBatch. Columns with an effect: `agent_name`, `uid` or
        `index` (samples with the same value are a group), and, outside of validations, `__do_sample__` (false: greedy).
        Fields of `meta_info`: `global_steps`, `do_sample` (false: all samples are greedy), and `validate` (true:
        `val_kwargs` are used, and exports leave the sessions out unless they request validation sessions). Each row
        runs once; AgentLoopManager repeats samples `n` times.

        `meta_info["failed_episodes"]` of the result is the number of failed samples: those that are left out, and those
        without a sampled token in the response.

        Raises AgentLoopFailed (see `on_failure`; also if all samples failed), TooManyFailedEpisodes, InvalidRequest for
        a batch of another form, and the errors of the servers.
        """
        prompts = Prompts.of(batch)
        n, name = repeats(self.rollout_config, prompts)
        if prompts.repeated(n, name) is not prompts:
            message = (
                f"{name} is {n}, but each sample of the batch runs once: AgentLoopManager repeats samples, and "
                "AgentLoopWorker does not"
            )
            warnings.warn(message, stacklevel=2)
        return as_given(await self.run_batch(prompts), batch)

    async def run_batch(self, prompts: Prompts) -> VerlBatch:
        """Like `generate_sequences`, for a batch that has been read, without the conversion of the result."""
        runs = await self._runs(prompts)
        async with opened(self.addresses) as servers:
            outputs, failed = await self._all(runs, servers)
        judged = [run.judged(output) for run, output in zip(runs, outputs, strict=True) if output is not None]
        rows = [row for row, output in enumerate(outputs) if output is not None]
        agents = objects([self.rollout_config.agent.default_agent_loop] * len(rows))
        made = padded_outputs(
            [output for output in outputs if output is not None],
            {"agent_name": agents, **prompts.kept(rows)},
            prompt_length=self.rollout_config.prompt_length,
            response_length=self.rollout_config.response_length,
            pad_token_id=self._pad_token_id,
        )
        made.meta_info["failed_episodes"] = len(failed) + sum(each is not None for each in judged)
        if self._on_failure == "drop":
            made.meta_info["failed"] = [{"row": each.row, "error": str(each)} for each in failed]
        return made

    async def _runs(self, prompts: Prompts) -> list[SampleRun]:
        validate = bool(prompts.meta.get("validate", False))
        index = prompts.columns.get("index", range(len(prompts)))
        info = await get_trajectory_info(int(prompts.meta.get("global_steps", -1)), list(index), validate)
        groups = _groups(prompts, int(prompts.meta.get("global_steps", -1)))
        sizes = Counter(groups)
        self.failures.group_size = max((size for group, size in sizes.items() if group is not None), default=1)
        traced = self._traced([str(each["sample_index"]) for each in info])
        runs = []
        for row, trajectory in enumerate(info):
            sample = prompts.sample(row)
            greedy = prompts.greedy or (not validate and not sample.pop("__do_sample__", True))
            runs.append(
                SampleRun(
                    self._options,
                    row,
                    sample,
                    self._sampling(validate) | (GREEDY if greedy else {}),
                    trajectory,
                    groups[row],
                    sizes[groups[row]],
                    seed=self._seed(row, trajectory),
                    spans=str(trajectory["sample_index"]) in traced,
                )
            )
        return runs

    def _sampling(self, validate: bool) -> dict[str, Any]:
        rollout = self.rollout_config
        given = sampling_of(rollout, validate=validate)
        return {**given, "repetition_penalty": 1.0, "logprobs": rollout.calculate_log_probs}

    def _traced(self, samples: Sequence[str]) -> Collection[str]:
        """The samples with spans: all, or `max_samples_per_step_per_worker` of them, drawn at random, with all their
        rollouts.
        """
        most, of_batch = self.rollout_config.trace.max_samples_per_step_per_worker, dict.fromkeys(samples)
        return of_batch if most is None or most >= len(of_batch) else random.sample(list(of_batch), most)

    def _seed(self, row: int, trajectory: Mapping[str, Any]) -> int | None:
        """The seed of a sample with `full_determinism`, derived from its position in its step; otherwise None."""
        rollout = self.rollout_config
        if not rollout.full_determinism:
            return None
        text = f"{rollout.seed or 0}\0{_key(row, trajectory)}"
        return int.from_bytes(blake2b(text.encode(), digest_size=4).digest())

    async def _all(
        self, runs: Sequence[SampleRun], servers: Sequence[Server]
    ) -> tuple[list[AgentLoopOutput | None], list[AgentLoopFailed]]:
        """The outputs by row, None for failed samples, and the failures."""
        placement = Placement(len(servers), len(runs), by_hash=self.rollout_config.full_determinism)
        outputs: dict[int, AgentLoopOutput] = {}
        failed: dict[int, AgentLoopFailed] = {}

        async def play(run: SampleRun) -> None:
            key = _key(run.row, run.trajectory)
            server = placement.choose(key) if self._chooser is None else self._chooser.server_of(key)
            try:
                with placement.counted(server):
                    output = await run.run(servers[server])
            except AgentLoopFailed as error:
                self.failures.note(error.failed)
                if self._on_failure == "raise":
                    raise
                failed[run.row] = error
                return
            self.failures.note(run.judged(output))
            outputs[run.row] = output

        await Scheduler(play, self._concurrency).run(runs)
        failures = [failed[row] for row in sorted(failed)]
        if failures and not outputs:
            raise failures[0]
        return [outputs.get(run.row) for run in runs], failures


def repeats(rollout: Config, prompts: Prompts) -> tuple[int, str]:
    """The number of runs of each sample of a batch, and the name of the setting for it."""
    name = "val_kwargs.n" if prompts.meta.get("validate") else "n"
    return rollout.select(name), f"actor_rollout_ref.rollout.{name}"


def _chooses(handles: Any) -> TypeGuard[AsyncLLMServerManager]:
    """Whether `handles` is a server manager that overrides `_choose_server`."""
    chooses = AsyncLLMServerManager._choose_server
    return isinstance(handles, AsyncLLMServerManager) and type(handles)._choose_server is not chooses


def _key(row: int, trajectory: Mapping[str, Any]) -> str:
    """The key of a sample of a step, which is the same in every run of the step."""
    return "-".join(str(each) for each in (trajectory["step"], trajectory["sample_index"], row, trajectory["validate"]))


def _groups(prompts: Prompts, step: int) -> list[str | None]:
    """The group of each sample: its `uid`, or its `index` in this batch; None without either."""
    if "uid" in prompts.columns:
        return [None if uid is None else str(uid) for uid in prompts.columns["uid"]]
    if "index" in prompts.columns:
        of_batch = uuid4().hex[:8]
        index = prompts.columns["index"]
        return [None if each is None else f"{each}-step-{step}-{of_batch}" for each in index]
    return [None] * len(prompts)
