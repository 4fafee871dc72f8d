"""Functions as tools: `@function_tool` registers one, with a schema from its type hints and docstring."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from tokengrove.errors import InvalidRequest
from tokengrove.verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

Function = TypeVar("Function", bound=Callable[..., Any])
Schema = OpenAIFunctionToolSchema | Mapping[str, Any]

FUNCTION_TOOL_REGISTRY: dict[str, FunctionTool] = {}
"""The tools of all decorated functions, by name."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """A function as a tool. It has no instances, so nothing is created or released."""

    name: str
    fn: Callable[..., Any]
    tool_schema: OpenAIFunctionToolSchema
    is_async: bool = False

    async def call(self, parameters: Mapping[str, Any]) -> Any:
        """Call the function with the model's arguments: await it, or run it in a thread if it is blocking."""
        if self.is_async:
            return await self.fn(**parameters)
        return await asyncio.to_thread(self.fn, **parameters)


@overload
def function_tool(name: Function, *, schema: None = None) -> Function: ...


@overload
def function_tool(name: str | None = None, *, schema: Schema | None = None) -> Callable[[Function], Function]: ...


def function_tool(name: Any = None, *, schema: Schema | None = None) -> Any:
    """Register a function as a tool, as `@function_tool`, `@function_tool("name")` or with `schema`, and return it.

    Without `schema` each parameter needs a type hint and an entry in `Args:` of a Google-style docstring;
    `transformers.utils.get_json_schema` reads both. Raises InvalidRequest if another function has the name, for
    *args and **kwargs, and for a missing hint or entry.
    """
    if callable(name):
        return _registered(name, name.__name__, schema)
    return lambda function: _registered(function, name or function.__name__, schema)


def get_function_tool(name: str) -> FunctionTool:
    """The registered tool. Raises KeyError with a hint where functions are registered."""
    if name not in FUNCTION_TOOL_REGISTRY:
        raise KeyError(f"there is no function tool {name!r}; is its file set as 'function_tool_path'?")
    return FUNCTION_TOOL_REGISTRY[name]


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """Run the Python file at `path`, once per process; return the tools that it registers or imports, sorted by name.

    Tools decorated with verl's own `function_tool` are included. Raises InvalidRequest if there is no such file.
    """
    file = Path(path).resolve()
    if not file.is_file():
        raise InvalidRequest(f"'function_tool_path': there is no file {path}", param="function_tool_path")
    before = set(_registries())
    module = _loaded(file)
    own = {id(value) for value in vars(module).values()}
    tools = [
        tool
        for name, tool in sorted(_registries().items())
        if name not in before or id(tool.fn) in own or tool.fn.__module__ == module.__name__
    ]
    if not tools:
        _log.warning("function_tool_path %s has no function with @function_tool", path)
    return tools


def normalize_function_tool_return(ret: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """The result of a function as response, reward and metrics; a missing or None reward is 0.0.

    A tuple is (response,), (response, reward) or (response, reward, metrics). A dict as response is converted to JSON,
    other values with `str`. Raises TypeError for a tuple of another length.
    """
    if not isinstance(ret, tuple):
        return response_of(ret), 0.0, {}
    if not 1 <= len(ret) <= 3:
        raise TypeError(
            f"a tool returned a tuple of length {len(ret)}: {ret!r}; "
            "write (response,), (response, reward) or (response, reward, metrics)"
        )
    response, reward, metrics = (*ret, None, None)[:3]
    return response_of(response), 0.0 if reward is None else float(reward), dict(metrics or {})


def response_of(value: Any) -> ToolResponse:
    """A tool's response as ToolResponse; a response of verl's class keeps its parts."""
    if isinstance(value, ToolResponse):
        return value
    if hasattr(value, "text") and hasattr(value, "image"):
        return ToolResponse(text=value.text, image=value.image, video=getattr(value, "video", None))
    if isinstance(value, dict):
        return ToolResponse(text=json.dumps(value, ensure_ascii=False))
    return ToolResponse(text=str(value))


def _registered(function: Function, name: str, schema: Schema | None) -> Function:
    existing = FUNCTION_TOOL_REGISTRY.get(name)
    if existing is not None and existing.fn is not function:
        raise InvalidRequest(
            f"the function tool {name!r} is {_place(existing.fn)}; {_place(function)} needs another name"
        )
    built = _inferred(function, name) if schema is None else OpenAIFunctionToolSchema.model_validate(_plain(schema))
    FUNCTION_TOOL_REGISTRY[name] = FunctionTool(name, function, built, inspect.iscoroutinefunction(function))
    return function


def _plain(schema: Any) -> Any:
    return schema if isinstance(schema, Mapping) else schema.model_dump(exclude_unset=True, exclude_none=True)


def _inferred(function: Callable[..., Any], name: str) -> OpenAIFunctionToolSchema:
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise InvalidRequest(f"{_place(function)} has *args or **kwargs, which have no schema; name its parameters")
    try:
        from transformers.utils import get_json_schema
        from transformers.utils.chat_template_utils import DocstringParsingException, TypeHintParsingException
    except ModuleNotFoundError:
        raise InvalidRequest(
            f"the schema of {_place(function)} needs transformers: "
            "pip install 'tokengrove[rollout]', or give @function_tool(schema=...)"
        ) from None
    try:
        read = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        raise InvalidRequest(f"{_place(function)}: {error}; or give @function_tool(schema=...)") from error
    return OpenAIFunctionToolSchema.model_validate({**read, "function": {**read["function"], "name": name}})


def _place(function: Callable[..., Any]) -> str:
    return f"{function.__module__}.{function.__qualname__}"


def _registries() -> dict[str, Any]:
    """All registered tools by name: ours, and verl's if its module is loaded."""
    theirs = sys.modules.get("verl.tools.function_tool")
    return {**getattr(theirs, "FUNCTION_TOOL_REGISTRY", {}), **FUNCTION_TOOL_REGISTRY}


def _loaded(file: Path) -> ModuleType:
    """The module of a file. Like an import, it runs once, and again after a failure. The file may already have been
    imported under its own name, for a class of tools in it.
    """
    for known in list(sys.modules.values()):
        path = getattr(known, "__file__", None) or ""
        if path.endswith(file.name) and Path(path).resolve() == file:
            return known
    name = "_function_tools_" + "_".join(part for part in file.with_suffix("").parts[1:])
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise InvalidRequest(f"'function_tool_path': {file} is not a Python file", param="function_tool_path")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        for tool in [tool for tool in FUNCTION_TOOL_REGISTRY.values() if tool.fn.__module__ == name]:
            del FUNCTION_TOOL_REGISTRY[tool.name]
        raise
    return module
