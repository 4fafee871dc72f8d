"""The call of an agent: `run(data, **extra)`, which may be a coroutine function or a plain one.

An agent gets of `extra` what its signature takes, so one that takes only `data` runs too. A plain function runs in a
thread, and the event loop goes on.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from proxy.rollout.failures import AgentFailed
from proxy.rollout.threads import in_thread


async def call_agent(run: Callable[..., Any], data: Any, extra: Mapping[str, Any]) -> Any:
    """Call an agent on the event loop, or in a thread if `run` is a plain function; return what it returns.

    What it raises is raised. Only SystemExit and KeyboardInterrupt, which would end the event loop with all that runs
    on it, become AgentFailed.
    """
    taken = _taken(run, extra)
    try:
        if inspect.iscoroutinefunction(run):
            return await run(data, **taken)
        result = await in_thread(partial(run, data, **taken))
        return await result if inspect.isawaitable(result) else result
    except (SystemExit, KeyboardInterrupt) as error:
        raise AgentFailed(type(error).__name__, str(error)) from error


def call_agent_here(agent: Any, data: Any, extra: Mapping[str, Any]) -> Any:
    """Call the `run` of an agent in this thread, which has no event loop; a coroutine gets one of its own."""
    result = agent.run(data, **_taken(agent.run, extra))
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


def _taken(run: Callable[..., Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `extra` that `run` takes by name."""
    try:
        parameters = inspect.signature(run).parameters.values()
    except (TypeError, ValueError):  # a function in C that does not tell
        return dict(extra)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(extra)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return {name: value for name, value in extra.items() if name in names}
