"""Tools by the names in configurations (`tool_id`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import resolve
from tokengrove.roll.runners.tools.mcp_tool import MCPTool
from tokengrove.roll.runners.tools.python_code_tool import PythonCodeTool
from tokengrove.roll.values.root_logger import same_root_logger


@dataclass(frozen=True)
class ToolSpec:
    """A tool's class, or its path `package.module:Class` (also of ROLL), and the arguments that it always receives."""

    id: str
    entry_point: Callable[..., Any] | str
    kwargs: dict[str, Any]


_tools: dict[str, ToolSpec] = {}


def register_tools(tool_id: str, entry_point: Callable[..., Any] | str, **kwargs: Any) -> None:
    """Register a tool. A path is imported when its first tool is created. Raises ValueError for a known name."""
    if tool_id in _tools:
        raise ValueError(f"there is a tool {tool_id!r} already: {_tools[tool_id].entry_point}")
    _tools[tool_id] = ToolSpec(tool_id, entry_point, kwargs)


def make_tool(tool_id: str, **kwargs: Any) -> Any:
    """Create a tool; `kwargs` take precedence over those of its registration.

    Raises InvalidRequest for an unknown name and a path that names nothing, and the tool's exceptions.
    """
    if (spec := _tools.get(tool_id)) is None:
        raise InvalidRequest(
            f"there is no tool {tool_id!r}; known are {', '.join(_tools)}, and register_tools(name, class) adds one",
            param="tool_id",
        )
    with same_root_logger():
        made = resolve(spec.entry_point, tool_id) if isinstance(spec.entry_point, str) else spec.entry_point
    return made(**{**spec.kwargs, **kwargs})


def print_tools() -> None:
    """Print the known tools."""
    for spec in _tools.values():
        print(f"{spec.id}: {spec.entry_point}" + (f", {spec.kwargs}" if spec.kwargs else ""))


register_tools("python_code", PythonCodeTool)
register_tools("mcp", MCPTool)
register_tools("search", "gem.tools.search_tool:SearchTool")
