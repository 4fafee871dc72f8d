"""Parses `tools` and `tool_choice` of the responses API. Hosted tools, which only a provider can run, are dropped.

The functions of a `namespace` become ordinary functions, and a call of one names its namespace again. If a name occurs
twice, the first function counts, so that a call is never ambiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.protocols.fields import expect_bool, expect_list, expect_object, expect_str, optional_object, optional_str
from proxy.protocols.tool_choice import check_tool_choice
from proxy.types import Tool, ToolChoice, ToolChoiceMode


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


def parse_tool_choice(value: Any, tools: ToolList) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return the choice, and the functions that the model sees: with `allowed_tools`, only those.

    Raises UnsupportedParameter for a hosted tool, InvalidRequest for a tool that the request does not have.
    """
    functions = tuple(tools.functions.values())
    if value is None:
        return ToolChoice(), functions
    if isinstance(value, str):
        return check_tool_choice(ToolChoice(_parse_mode(value, "tool_choice")), functions), functions
    wanted = expect_object(value, "tool_choice")
    kind = optional_str(wanted, "type", "tool_choice.")
    if kind == "allowed_tools":
        return _parse_allowed(wanted, functions)
    choice = ToolChoice(ToolChoiceMode.NAMED, _function_name(wanted, "tool_choice"))
    return check_tool_choice(choice, functions), functions


def _parse_mode(value: str, name: str) -> ToolChoiceMode:
    if value not in ("auto", "none", "required"):
        raise InvalidRequest(f"'{name}' must be auto, none, required or an object, not {value!r}", param=name)
    return ToolChoiceMode(value)


def _parse_allowed(wanted: Mapping[str, Any], functions: Sequence[Tool]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    # Newer schemas nest mode and tools in an object, as the chat API does.
    wanted = optional_object(wanted, "allowed_tools") or wanted
    mode = _parse_mode(optional_str(wanted, "mode", "tool_choice.") or "auto", "tool_choice.mode")
    listed = expect_list(wanted.get("tools"), "tool_choice.tools")
    names = {_allowed_name(item, f"tool_choice.tools[{index}]") for index, item in enumerate(listed)}
    for name in sorted(names - {function.name for function in functions}):
        check_tool_choice(ToolChoice(ToolChoiceMode.NAMED, name), functions)
    allowed = tuple(function for function in functions if function.name in names)
    if mode is ToolChoiceMode.REQUIRED and len(allowed) == 1:  # forcing it leaves the prompt unchanged
        return ToolChoice(ToolChoiceMode.NAMED, allowed[0].name), tuple(functions)
    return check_tool_choice(ToolChoice(mode), allowed), allowed


def _allowed_name(item: Any, name: str) -> str:
    return _function_name(expect_object(item, name), name)


def _function_name(wanted: Mapping[str, Any], name: str) -> str:
    kind = optional_str(wanted, "type", f"{name}.")
    if kind != "function":
        message = f"'{name}' names a tool of type {kind!r}; this server supports functions only"
        raise UnsupportedParameter(message, param=name)
    return expect_str(wanted.get("name"), f"{name}.name")
