"""Parses `tools` of the responses API. Hosted tools, which only a provider can run, are dropped.

The functions of a `namespace` become ordinary functions. A call of one includes its namespace again. If a name occurs
twice, the first function counts, so that calls are never ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.protocols.fields import expect_bool, expect_list, expect_object, expect_str, optional_str
from proxy.types import Tool


@dataclass(slots=True)
class ToolList:
    """Functions by name, namespaces by function name, and the paths of dropped tools."""

    functions: dict[str, Tool] = field(default_factory=dict)
    namespaces: dict[str, str] = field(default_factory=dict)
    dropped: list[str] = field(default_factory=list)


def parse_tools(value: Any) -> ToolList:
    """Parse the tools of a request. Raises InvalidRequest with the path of the field."""
    tools = ToolList()
    if value is not None:
        _add_tools(tools, expect_list(value, "tools"), "tools", None)
    return tools


def _add_tools(tools: ToolList, items: Sequence[Any], at: str, namespace: str | None) -> None:
    for index, item in enumerate(items):
        name = f"{at}[{index}]"
        tool = expect_object(item, name)
        kind = optional_str(tool, "type", f"{name}.") or "function"
        if kind == "function":
            _add_function(tools, _parse_function(tool, name), name, namespace)
        elif kind == "namespace" and namespace is None:
            inner = expect_list(tool.get("tools"), f"{name}.tools")
            _add_tools(tools, inner, f"{name}.tools", expect_str(tool.get("name"), f"{name}.name"))
        else:
            tools.dropped.append(f"{name} of type {kind}")


def _add_function(tools: ToolList, function: Tool, name: str, namespace: str | None) -> None:
    if function.name in tools.functions:
        tools.dropped.append(f"{name} with a name already in use: {function.name}")
        return
    tools.functions[function.name] = function
    if namespace is not None:
        tools.namespaces[function.name] = namespace


def _parse_function(tool: Mapping[str, Any], name: str) -> Tool:
    parameters, strict = tool.get("parameters"), tool.get("strict")
    return Tool(
        name=expect_str(tool.get("name"), f"{name}.name"),
        description=optional_str(tool, "description", f"{name}.") or "",
        parameters={} if parameters is None else expect_object(parameters, f"{name}.parameters"),
        strict=None if strict is None else expect_bool(strict, f"{name}.strict"),
    )
