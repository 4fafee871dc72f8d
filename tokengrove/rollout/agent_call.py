"""Calls the `run(data, **extra)` of an agent, which may be a coroutine function or a plain function.

The agent gets the entries of `extra` that its signature accepts, so `run(data)` also works. A plain function runs in a
thread and does not block the event loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import cache, partial
from typing import Any

from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.threads import in_thread


async def call_agent(run: Callable[..., Any], data: Any, extra: Mapping[str, Any]) -> Any:
    """Call an agent on the event loop, or in a thread if `run` is a plain function, and return its result.

    Raises the agent's exception. `contained` converts exceptions that would end more than the episode.
    """
    taken = _taken(run, extra)
    with contained():
        if inspect.iscoroutinefunction(run):
            return await run(data, **taken)
        result = await in_thread(partial(run, data, **taken))
        return await result if inspect.isawaitable(result) else result


@contextmanager
def contained() -> Iterator[None]:
    """Convert exceptions of an agent that would end more than its episode to AgentFailed.

    SystemExit and KeyboardInterrupt would end the event loop with every episode on it. A CancelledError would look like
    the cancellation of the caller, so it is converted unless this task is being cancelled.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        if (task := asyncio.current_task()) is None or task.cancelling():
            raise
        raise AgentFailed("CancelledError", "the agent was cancelled from inside") from error
    except (SystemExit, KeyboardInterrupt) as error:
        raise AgentFailed(type(error).__name__, str(error)) from error


def call_agent_here(agent: Any, data: Any, extra: Mapping[str, Any]) -> Any:
    """Call the `run` of an agent in this thread, which has no running event loop.

    Coroutines run on one event loop of the process, one at a time. All calls share the loop, because SDKs keep
    connections for the whole process and use them in later calls. Tasks that an agent leaves behind are cancelled.
    """
    result = agent.run(data, **_taken(agent.run, extra))
    if not inspect.isawaitable(result):
        return result
    return _runner().run(_alone(result), context=copy_context())


@cache
def _runner() -> asyncio.Runner:
    return asyncio.Runner()


async def _alone(result: Awaitable[Any]) -> Any:
    try:
        return await result
    finally:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


def _taken(run: Callable[..., Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of `extra` that `run` accepts by name."""
    try:
        parameters = inspect.signature(run).parameters.values()
    except (TypeError, ValueError):  # a function in C without a signature
        return dict(extra)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(extra)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = {parameter.name for parameter in parameters if parameter.kind in by_name}
    return {name: value for name, value in extra.items() if name in names}
