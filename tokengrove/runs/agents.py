"""The agent of a run, and checks before the run: a misspelt name would fail ten thousand episodes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.rollout.command import CommandAgent
from tokengrove.rollout.command_options import from_this_folder
from tokengrove.rollout.episodes import AgentSpec, Task, check_functions, is_path, resolve_agent
from tokengrove.rollout.harbor import agent_spec, is_harbor
from tokengrove.rollout.harbor.data import FOLDER
from tokengrove.rollout.imports import load
from tokengrove.rollout.run_options import RunOptions


def agent_of(options: RunOptions, task: Task) -> AgentSpec:
    """The agent that the options name. If `task` is a Harbor task, its folder determines how it is played."""
    if options.command:
        spec = AgentSpec("command", words=options.command, arguments=from_this_folder(options.agent_arg))
    else:
        spec = AgentSpec("path", options.agent or "", arguments=options.agent_arg)
    return agent_spec(spec) if _is_of_harbor(task) else spec


def _is_of_harbor(task: Task) -> bool:
    folder = task.data.get(FOLDER)
    return isinstance(folder, str) and is_harbor(Path(folder))


def check_paths(options: RunOptions, task: Task) -> None:
    """Look up the agent and functions of the options, and check that `task`, one of the run's, has their arguments.

    Raises ConfigurationError for a path that does not exist, for an object that is not a suitable function, and for a
    parameter without a value. Errors of imports are raised unchanged.
    """
    if options.agent is not None and is_path(options.agent):
        _checked("agent", lambda: load(options.agent or ""))
    _checked("--reward", lambda: check_functions(options.reward, (), task))
    _checked("--scorer", lambda: check_functions(None, options.scorer, task))


async def check_agent(options: RunOptions, task: Task) -> None:
    """Create the agent once. Raises ConfigurationError for an object that is not an agent or for wrong arguments, and
    for a command in a remote sandbox that cannot reach its --server-url.

    Errors of its constructor are raised unchanged.
    """
    spec = agent_of(options, task)
    try:
        agent = resolve_agent(spec)
    except InvalidRequest as error:
        raise ConfigurationError(f"agent {options.agent or options.command[0]}: {error.message}") from None
    if isinstance(agent, CommandAgent):
        agent.check_server()
    await agent.close()


def _checked(name: str, check: Callable[[], object]) -> None:
    try:
        check()
    except InvalidRequest as error:
        raise ConfigurationError(f"{name} {error.message}") from None
