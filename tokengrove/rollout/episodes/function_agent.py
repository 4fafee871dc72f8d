"""A plain function as an agent: it gets the values that its parameters name, without the control key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.environment import placeholder_key
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.agent_access import KNOWN, agent_access
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.function_calls import call, is_async
from tokengrove.rollout.named_arguments import check_arguments, parameters, unknown, wanted


class FunctionAgent:
    """Calls a function for each episode: a coroutine function on the event loop, a plain function in its own thread.

    The first parameter gets the row, unless its name is in `KNOWN` or `arguments`. `arguments`: further arguments.
    Raises InvalidRequest for an argument that the function does not accept, and for a parameter that cannot be filled.
    """

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any], name: str) -> None:
        self._function, self._arguments, self.name = function, dict(arguments), name
        check_arguments(function, arguments, name)
        self._row = _row_parameter(function, arguments)
        filled = {*KNOWN, *arguments, *([self._row] if self._row else [])}
        if missing := [name for name in unknown(function, filled) if name != self._row]:
            raise InvalidRequest(
                f"{name} has the parameter {missing[0]!r}, which nothing fills: known names are {', '.join(KNOWN)}; "
                "give others as arguments of the agent",
                param=missing[0],
            )

    async def play(self, episode: Episode) -> Reward:
        """Call the function. Raises its exception."""
        names = [name for name in wanted(self._function, KNOWN) if name not in self._arguments]
        row = [episode.task.data] if self._row else []
        with placeholder_key():
            async with AsyncExitStack() as stack:
                given = agent_access(names, episode, stack, blocking=not is_async(self._function))
                result: Reward = await call(self._function, *row, **given, **self._arguments)
        return result

    async def close(self) -> None:
        """Do nothing: episodes share no resources."""


def _row_parameter(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str | None:
    """The name of the first parameter if it gets the row by position."""
    for each in parameters(function)[:1]:
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD):
            return None if each.name in KNOWN or each.name in arguments else each.name
    return None
