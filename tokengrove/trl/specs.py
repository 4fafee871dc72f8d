"""The arguments by which a trainer names an agent or a reward function, and tasks from the rows of its dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokengrove.client.options import SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes import AgentSpec, Task
from tokengrove.rollout.imports import load

Named = str | Callable[..., Any]
"""A function or a class of a module, or its path (`package.module:Name`)."""

NamedAgent = AgentSpec | Named | Sequence[str]
"""An agent: a name, or the words of a command."""


def spec_of(agent: NamedAgent, arguments: Mapping[str, Any] | None = None) -> AgentSpec:
    """The AgentSpec of an agent. Raises InvalidRequest for an object without a path."""
    if isinstance(agent, AgentSpec):
        return agent
    if isinstance(agent, str) or callable(agent):
        return AgentSpec("path", target=path_of(agent), arguments=dict(arguments or {}))
    return AgentSpec("command", words=tuple(agent), arguments=dict(arguments or {}))


def path_of(named: Named) -> str:
    """The path of a function or class, by which the process that plays the episode imports it."""
    if isinstance(named, str):
        return named
    module, name = getattr(named, "__module__", None), getattr(named, "__qualname__", None)
    path = f"{module}:{name}"
    try:
        if load(path) is named:
            return path
    except InvalidRequest:
        pass
    raise InvalidRequest(
        f"{named!r} has no path by which the process that plays an episode could import it; "
        "make it a function or a class of a module"
    )


def task_of(row: Any, default: str) -> Task:
    """A row as a task. Its id is the row's (`task_id`, `id`), else `default`; a plain prompt becomes its `prompt`."""
    if isinstance(row, Task):
        return row
    data = dict(row) if isinstance(row, Mapping) else {"prompt": row}
    name = data.get("task_id", data.get("id"))
    return Task(default if name is None else str(name), data)


def sampled(options: SessionOptions, sampling: Mapping[str, Any] | None) -> SessionOptions:
    """The options with the trainer's sampling, if any, which overrides that of the agent's requests."""
    if not sampling:
        return options
    return {**options, "sampling": {**options.get("sampling", {}), **sampling}, "sampling_policy": "override"}
