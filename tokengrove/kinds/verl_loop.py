"""verl's agent loops: a loop is created for each episode, and samples in its session."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest, how_to_get
from tokengrove.rollout.config import Config
from tokengrove.rollout.episodes import Episode
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.task_fields import messages_of
from tokengrove.verl import AgentLoopBase, ToolListWrap
from tokengrove.verl.registry import register_file, resolve
from tokengrove.verl.sample_run import LoopOptions, SampleRun, ending, set_named_rewards
from tokengrove.verl.servers import Address, Server, opened
from tokengrove.verl.settings import check_settings, sampling_of, trainer_config, warn_of_unused
from tokengrove.verl.tools import load_all_tools

_OF_RUNS = {
    "n": (1, "--group-size says how often a task is played"),
    "val_kwargs.n": (1, "--group-size says how often a task is played"),
    "full_determinism": (False, "give --seed"),
    "seed": (None, "give --seed"),
    "enable_rollout_routing_replay": (False, "serve with --replay experts, and export the samples with their experts"),
}
"""Rollout settings that are options of a run: the value that needs no warning, and the option to use."""


class LoopAgent:
    """Plays with a subclass of AgentLoopBase, or with a loop by its registered name.

    In `arguments`, `config` is the trainer's configuration, a mapping or the path of a YAML file; all others are
    arguments of the loop's class. The columns of the sample are the fields of the row and `raw_prompt`, the initial
    messages of the row. The sampling is that of the configuration; the session's own sampling takes precedence.

    Raises InvalidRequest for a name that is not registered, for settings that verl does not have, and for an argument
    that the class does not accept.
    """

    def __init__(self, loop: Any, arguments: Mapping[str, Any], name: str) -> None:
        own = dict(arguments)
        self._config = _config(own.pop("config", None))
        rollout = self._config.actor_rollout_ref.rollout
        if (path := rollout.agent.agent_loop_config_path) is not None:
            register_file(path)
        found, _ = resolve(loop)
        _check(found, own, name)
        self._loop, self._arguments, self.name = loop, own, name
        paths = rollout.multi_turn.tool_config_path, rollout.multi_turn.function_tool_path
        tools = ToolListWrap(load_all_tools(*paths)) if any(paths) else None
        self._options = LoopOptions(self._config, tools=tools)
        self._stack = AsyncExitStack()
        self._servers: dict[tuple[str, int], Server] = {}
        self._opening = asyncio.Lock()

    async def play(self, episode: Episode) -> Reward:
        """Run the loop. Its errors are raised unchanged, and its metrics become those of the session."""
        server, session = await self._server(episode), episode.session
        output, called = await self._run(episode).output(server, session)
        if not called:
            return None
        await set_named_rewards(session, output)
        told = ending(output, called=called)
        episode.ending["metrics"] = told["metrics"]
        if told["exit_reason"]:
            episode.ending["exit_reason"] = told["exit_reason"]
        return output.reward_score

    async def close(self) -> None:
        """Close the connections to the servers."""
        await self._stack.aclose()

    def _run(self, episode: Episode) -> SampleRun:
        plan, rollout = episode.plan, self._config.actor_rollout_ref.rollout
        of_run = plan.options.get("sampling", {})
        configured = sampling_of(rollout, validate=plan.validation)
        sampling = {name: value for name, value in configured.items() if name not in of_run}
        return SampleRun(
            options=self._options,
            row=plan.sample,
            sample={**plan.task.data, "raw_prompt": messages_of(plan.task), "agent_name": self._loop},
            sampling_params={**sampling, "repetition_penalty": 1.0, "logprobs": rollout.calculate_log_probs},
            trajectory={
                **{"step": -1, "sample_index": plan.task.task_id, "rollout_n": plan.sample},
                "validate": plan.validation,
            },
            group_id=None,
            group_size=1,
            loop_arguments=self._arguments,
        )

    async def _server(self, episode: Episode) -> Server:
        """The loops' connections to the episode's server, shared by all episodes with this server."""
        client = episode.client
        key = client.url, id(client.app)
        async with self._opening:
            if key not in self._servers:
                place = Address(None if client.app else client.url, client.app, client.admin_key)
                (self._servers[key],) = await self._stack.enter_async_context(opened([place]))
        return self._servers[key]


def _config(given: Any) -> Config:
    config = trainer_config(_of_file(given) if isinstance(given, str) else given)
    check_settings(config)
    warn_of_unused(config, _OF_RUNS)
    return config


def _of_file(path: str) -> Any:
    try:
        import yaml
    except ModuleNotFoundError:
        raise InvalidRequest(f"'config' {path!r} needs pyyaml: {how_to_get('pyyaml')}", param="config") from None
    try:
        return yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InvalidRequest(f"'config' {path!r}: {error}", param="config") from None
    except RecursionError:
        raise InvalidRequest(f"'config' {path!r} is nested too deeply", param="config") from None


def _check(loop: type, arguments: Mapping[str, Any], name: str) -> None:
    """Raise InvalidRequest for an argument that the signatures of the class do not accept."""
    made = loop.__init__ is AgentLoopBase.__init__  # type: ignore[misc]
    signatures = [inspect.signature(getattr(loop, "init_class", loop))] if made else [inspect.signature(loop)]
    listed = [each for signature in signatures for each in signature.parameters.values()]
    if any(each.kind is each.VAR_KEYWORD for each in listed):
        return
    names = {each.name for each in listed}
    if wrong := sorted(arguments.keys() - names):
        raise InvalidRequest(
            f"{name} takes no argument {wrong[0]!r}; `config` is the trainer's configuration, and others are those of "
            f"the loop's class: {', '.join(sorted(names - {'config', 'tokenizer'})) or 'none'}",
            param=wrong[0],
        )
