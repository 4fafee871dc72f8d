"""One call of a tool. A created instance is always released: after an error, after a cancellation, and also if either
happens during its creation or release.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tokengrove.verl.tools.function_tools import normalize_function_tool_return, response_of
from tokengrove.verl.tools.schemas import ToolResponse

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. `reward`: its reward, or None. `score`: the value of `calc_reward`, if it was called."""

    response: ToolResponse
    reward: float | None
    metrics: dict[str, Any]
    score: float | None = None


async def use_tool(tool: Any, arguments: dict[str, Any], kwargs: Mapping[str, Any], agent_data: Any) -> ToolResult:
    """Call a tool with the model's arguments; `kwargs` is the sample's `tools_kwargs[tool.name]`.

    Raises the tool's exceptions.
    """
    if not hasattr(tool, "create"):  # a function tool, ours or verl's
        return ToolResult(*normalize_function_tool_return(await tool.call(arguments)))
    release_kwargs = kwargs.get("release_kwargs") or {}
    instance_id = await _created(tool, kwargs.get("create_kwargs") or {}, release_kwargs)
    try:
        given = {**(kwargs.get("execute_kwargs") or {}), **_accepted(tool.execute, agent_data=agent_data)}
        response, reward, metrics = await _called(tool.execute, instance_id, arguments, **given)
        score = None
        if kwargs.get("calc_reward_kwargs") is not None:
            score = float(await _called(tool.calc_reward, instance_id, **kwargs["calc_reward_kwargs"]))
        return ToolResult(response_of(response), None if reward is None else float(reward), dict(metrics or {}), score)
    finally:
        await _to_the_end(_released(tool, instance_id, release_kwargs))


async def _created(tool: Any, create_kwargs: Mapping[str, Any], release_kwargs: Mapping[str, Any]) -> Any:
    """The id of a new instance. A cancellation cancels an async `create` and waits for a blocking one; an instance that
    was still created is released.
    """
    creating = asyncio.ensure_future(_id_of_new(tool, create_kwargs))
    try:
        return await asyncio.shield(creating)
    except asyncio.CancelledError:
        if inspect.iscoroutinefunction(tool.create):
            creating.cancel()
        await asyncio.wait([creating])
        if not creating.cancelled() and creating.exception() is None:
            await _to_the_end(_released(tool, creating.result(), release_kwargs))
        raise


async def _id_of_new(tool: Any, create_kwargs: Mapping[str, Any]) -> Any:
    """Create an instance. `create` returns its id, or the id with a response."""
    given = {**create_kwargs, **_accepted(tool.create, create_kwargs=create_kwargs)}
    created = await _called(tool.create, **given)
    return created[0] if isinstance(created, tuple) else created


async def _released(tool: Any, instance_id: Any, release_kwargs: Mapping[str, Any]) -> None:
    try:
        await _called(tool.release, instance_id, **release_kwargs)
    except Exception as error:  # must not replace the result or the exception of the call
        _log.warning("tool %s did not release %s: %s: %s", tool.name, instance_id, type(error).__name__, error)


def _accepted(method: Callable[..., Any], **offered: Any) -> dict[str, Any]:
    """The arguments of `offered` that the method accepts: tools differ in their signatures."""
    parameters = inspect.signature(method).parameters
    takes_all = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in offered.items() if takes_all or name in parameters}


async def _called(method: Callable[..., Any], *values: Any, **named: Any) -> Any:
    """Await a method, or run a blocking one in a thread. A cancellation waits until the thread ends."""
    if inspect.iscoroutinefunction(method):
        return await method(*values, **named)
    result = await _to_the_end(asyncio.to_thread(method, *values, **named))
    return await result if inspect.isawaitable(result) else result


async def _to_the_end(work: Coroutine[Any, Any, T]) -> T:
    """Finish `work` even if the caller is cancelled; the cancellation is raised afterwards."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        if not task.done():
            await asyncio.wait([task])
        raise
