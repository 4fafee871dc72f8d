"""The agent of a task in its environment: a command or a coroutine function."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from tokengrove.client.exit_reason import storable
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.command.addresses import addresses_of
from tokengrove.rollout.command.failures import failure_of
from tokengrove.rollout.command.placeholders import Placeholders
from tokengrove.rollout.command.variables import codex_configuration, command_variables, passed_variables
from tokengrove.rollout.command_options import CommandOptions
from tokengrove.rollout.episodes import Episode, EpisodeEnded
from tokengrove.rollout.episodes.agent_access import KNOWN, agent_access
from tokengrove.rollout.function_calls import is_async
from tokengrove.rollout.harbor.harbor_sandbox import HarborSandbox
from tokengrove.rollout.harbor.task_folder import Stage
from tokengrove.rollout.harbor.trial import trial_folder
from tokengrove.rollout.imports import load
from tokengrove.rollout.named_arguments import check_arguments, unknown, wanted
from tokengrove.rollout.placeholder_names import check_placeholders

HOME = "/root"
_OWN = ("instruction", "sandbox", "step")


class AgentPhase(Protocol):
    """Plays a stage of a task."""

    async def play(
        self, episode: Episode, stage: Stage, sandbox: HarborSandbox, limit_s: float | None
    ) -> EpisodeEnded | None:
        """Play the stage until the agent ends, or for `limit_s` seconds; return its failure, or None."""
        ...


class CommandPhase:
    """Runs an unmodified program. Its placeholders and variables are those of other commands."""

    def __init__(self, words: Sequence[str], options: CommandOptions) -> None:
        """Raises ConfigurationError for a misspelt placeholder."""
        self._words, self._options = tuple(words), options
        for word in self._words:
            check_placeholders(word, "the command")

    async def play(
        self, episode: Episode, stage: Stage, sandbox: HarborSandbox, limit_s: float | None
    ) -> EpisodeEnded | None:
        if episode.client.app is not None:
            raise InvalidRequest(
                "a command is another process, which cannot reach a server in this process: start `tokengrove serve` "
                "and give its address",
                param="url",
            )
        options = self._options
        values = Placeholders.of(
            episode, workdir=sandbox.working_folder, home=HOME, model=options.model, server_url=options.server_url
        )
        values = replace(values, prompt=stage.instruction)
        addresses = addresses_of(episode.session, options.server_url)
        await sandbox.upload(f"{HOME}/.codex/config.toml", codex_configuration(addresses, options.model).encode())
        output = _output(options.keep_output, episode, stage)
        try:
            process = await sandbox.launch(
                values.words(self._words), self._variables(episode, values), stdin=self._stdin(values), output=output
            )
        except (OSError, ValueError) as error:  # a prompt that is too long or has a null character
            return EpisodeEnded("Failed", f"the command cannot be started: {error}")
        ended = await process.wait(limit_s)
        episode.ending["metrics"] = {**episode.ending.get("metrics", {}), "exit_code": float(ended.exit_code)}
        problem = failure_of(ended, "the command", limit_s)
        if problem is not None:  # the tests decide the reward; the session has the reason why they may fail
            episode.ending["exit_reason"] = storable(str(problem))
        return problem

    def _variables(self, episode: Episode, values: Placeholders) -> dict[str, str]:
        options = self._options
        session = command_variables(episode, model=options.model, server_url=options.server_url)
        own = {name: values.fill(value) for name, value in options.env.items()}
        return {**session, **passed_variables(options.pass_env), **own}

    def _stdin(self, values: Placeholders) -> bytes:
        given = self._options.stdin or ("none" if any("{prompt}" in word for word in self._words) else "prompt")
        return values.fill("{prompt}").encode() if given == "prompt" else b""


class FunctionPhase:
    """Calls a coroutine function that works in the environment through `sandbox`.

    Its parameters are filled by name: `instruction`, `sandbox`, `step` (the name of the step or None), and the
    parameters of other functions that are agents (`session`, `base_url`, `api_key`, `task`, `seed`, ...).
    """

    def __init__(self, path: str, arguments: Mapping[str, Any]) -> None:
        """Raises InvalidRequest or ConfigurationError if it is not such a function."""
        self._function: Callable[..., Any] = load(path)
        if not callable(self._function) or not is_async(self._function):
            raise ConfigurationError(
                f"{path} cannot play Harbor tasks: use a command, or a coroutine function with the parameter `sandbox`"
            )
        check_arguments(self._function, arguments, path)
        self._arguments = dict(arguments)
        if missing := unknown(self._function, {*_OWN, *KNOWN, *arguments}):
            raise InvalidRequest(f"{path} has the parameter {missing[0]!r}, which nothing fills", param=missing[0])

    async def play(
        self, episode: Episode, stage: Stage, sandbox: HarborSandbox, limit_s: float | None
    ) -> EpisodeEnded | None:
        own = {"instruction": stage.instruction, "sandbox": sandbox, "step": stage.name}
        names = [name for name in wanted(self._function, (*_OWN, *KNOWN)) if name not in self._arguments]
        async with AsyncExitStack() as stack:
            known = agent_access([name for name in names if name not in own], episode, stack)
            given = {**known, **{name: own[name] for name in names if name in own}, **self._arguments}
            try:
                async with asyncio.timeout(limit_s) as limit:
                    await self._function(**given)
            except TimeoutError:
                if not limit.expired():
                    raise
                return EpisodeEnded("Timeout", f"the agent has not ended within {limit_s:g} s")
        return None


def _output(folder: str | None, episode: Episode, stage: Stage) -> Path | None:
    """The file for the output of a command."""
    if folder is None:
        return None
    path = trial_folder(folder, episode.plan.session_id, stage) / "command.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path
