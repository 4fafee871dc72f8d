"""A verifier that is a Python function: it gets the values that its parameters name, and returns the reward.

| parameter | value |
|---|---|
| `task` or `data` | the row of the data |
| `workdir` | the working folder of the command on this machine, as a `pathlib.Path` |
| `exit_code`, `output`, `timed_out` | of the command: an integer, the end of its output, whether it timed out |
| `messages` | the conversation that ends with the last turn of the agent, including its reply, as chat messages |
| `interaction_ids` | the ids of the complete turns, in order of completion |
| `session_id`, `task_id`, `sample`, `seed` | values of the episode |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.command.workplace import Workplace
from tokengrove.rollout.episodes import RewardFailed
from tokengrove.rollout.function_calls import call_within
from tokengrove.rollout.imports import load
from tokengrove.rollout.named_arguments import unknown, wanted
from tokengrove.rollout.returned_rewards import number
from tokengrove.rollout.sandboxes import CommandResult
from tokengrove.rollout.trajectory import complete, last_of, read_trajectory, read_tree

_KNOWN = (
    *("task", "data", "workdir", "exit_code", "output", "timed_out", "messages", "interaction_ids"),
    *("session_id", "task_id", "sample", "seed"),
)
_WAY_OUT = "return a number, a dict of numbers by name, or None"


def load_verifier(path: str) -> Callable[..., Any]:
    """Import the function.

    Raises InvalidRequest or ConfigurationError if it is not a function or has an unknown parameter.
    """
    found = load(path)
    if not callable(found) or isinstance(found, type):
        raise ConfigurationError(f"--verifier-function {path} is not a function")
    if missing := unknown(found, _KNOWN):
        raise ConfigurationError(
            f"--verifier-function {path} has the parameter {missing[0]!r}, which is none of {', '.join(_KNOWN)}: "
            "rename it, or give it a default"
        )
    function: Callable[..., Any] = found
    return function


async def verify_by_function(
    place: Workplace, function: Callable[..., Any], ended: CommandResult
) -> dict[str, float] | None:
    """Call the function; return its rewards by name, or None if it returns None. Raises RewardFailed."""
    limit_s = place.options.verifier_timeout_s
    name = place.options.verifier_function or ""
    try:
        await place.fetch()
    except (ValueError, OSError) as error:
        raise RewardFailed(f"the working folder cannot be copied to this machine: {error}") from error
    given = await _arguments(place, function, ended)
    try:
        returned = await call_within(limit_s, name, function, **given)
    except TimeoutError as error:
        if place.options.timeout_reward is not None:
            return {"reward": place.options.timeout_reward}
        raise RewardFailed(f"{error} (verifier_timeout_s)") from error
    except Exception as error:
        raise RewardFailed(f"{name}: {type(error).__name__}: {error}") from error
    try:
        return _named(returned, name)
    except (ValueError, TypeError) as error:
        raise RewardFailed(str(error)) from error


def _named(returned: Any, name: str) -> dict[str, float] | None:
    told = f"{name} returned"
    if returned is None:
        return None
    if not isinstance(returned, Mapping):
        return {"reward": number(returned, told, _WAY_OUT)}
    named = {str(key): number(value, f"{told} {key}:", _WAY_OUT) for key, value in returned.items()}
    if "reward" not in named and len(named) != 1:
        raise ValueError(f"{told} {', '.join(named) or 'nothing'}, and none of them is named reward")
    return named


async def _arguments(place: Workplace, function: Callable[..., Any], ended: CommandResult) -> dict[str, Any]:
    episode, names = place.episode, wanted(function, _KNOWN)
    plan, data = episode.plan, episode.task.data
    known: dict[str, Any] = {
        **{"task": data, "data": data, "workdir": place.folder, "exit_code": ended.exit_code, "output": ended.output},
        **{"timed_out": ended.timed_out, "session_id": plan.session_id, "task_id": plan.task.task_id},
        **{"sample": plan.sample, "seed": plan.seed},
    }
    if {"messages", "interaction_ids"} & set(names):
        tree = await read_tree(episode.client, plan.session_id)
        nodes = complete(tree)
        known["interaction_ids"] = [node.id for node in nodes]
        if "messages" in names:
            known["messages"] = (await read_trajectory(episode.client, tree, data, last_of(nodes))).messages
    return {name: known[name] for name in names}
