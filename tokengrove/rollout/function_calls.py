"""Calls a user's function: a coroutine function on the event loop, a plain function in a thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.threads import in_thread


async def call(function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Return the result of `function`, awaited if it is awaitable. Raises the exception of the function.

    Exceptions that are not an Exception become AgentFailed, except CancelledError: SystemExit would end the event loop,
    and pytest's failures are of this kind.
    """
    try:
        if is_async(function):
            return await function(*arguments, **named)
        result = await in_thread(partial(function, *arguments, **named))
        return await result if inspect.isawaitable(result) else result
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        raise AgentFailed(type(error).__name__, str(error)) from error


async def call_within(seconds: float | None, name: str, function: Callable[..., Any], *given: Any, **named: Any) -> Any:
    """Like `call`, but raise TimeoutError, which names the function, after `seconds`; None: no limit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            return await call(function, *given, **named)
    except TimeoutError as error:
        if limit.expired():
            raise TimeoutError(f"{name} has not ended within {seconds:g} s") from error
        raise  # the function raised it


def is_async(function: Callable[..., Any]) -> bool:
    """Whether a call returns a coroutine, including objects with `async def __call__` and partials."""
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
