"""Parses tools and the choice among them: functions that the client runs, and tools that only Google runs.

The second are left out and named, because no model of this server could call them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.protocols.fields import expect_list, expect_object, expect_str, expect_text, optional_str
from proxy.protocols.google.names import MOST_SHOWN, given, in_camel
from proxy.protocols.google.schemas import json_schema
from proxy.protocols.hosted_tools import HostedTool
from proxy.types import Tool, ToolChoice, ToolChoiceMode
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

FUNCTIONS = "functionDeclarations"
HOSTED_TOOLS = frozenset(
    {
        *("retrieval", "fileSearch", "googleSearch", "googleMaps", "codeExecution", "enterpriseWebSearch"),
        *("googleSearchRetrieval", "parallelAiSearch", "urlContext", "mcpServers", "exaAiSearch"),
    }
)
"""Tools that Google's servers run."""
REFUSED_TOOLS = frozenset({"computerUse"})
"""Tools that a client runs, but whose functions only Google's models know."""
_TOOLS = frozenset({FUNCTIONS}) | HOSTED_TOOLS | REFUSED_TOOLS

DECLARED = frozenset({"name", "description", "parameters", "parametersJsonSchema"})
"""The fields of a function declaration that the model is shown."""
IGNORED_DECLARED = frozenset({"response", "responseJsonSchema", "behavior"})
"""The fields for which chat templates have no place."""

CHOICE = frozenset({"mode", "allowedFunctionNames"})
IGNORED_CHOICE = frozenset({"streamFunctionCallArguments"})
CONFIG = frozenset({"functionCallingConfig"})
IGNORED_CONFIG = frozenset({"retrievalConfig", "includeServerSideToolInvocations"})
_AT = "toolConfig.functionCallingConfig"
_MODES = {
    "MODE_UNSPECIFIED": ToolChoiceMode.AUTO,
    "AUTO": ToolChoiceMode.AUTO,
    "VALIDATED": ToolChoiceMode.AUTO,
    "ANY": ToolChoiceMode.REQUIRED,
    "NONE": ToolChoiceMode.NONE,
}


def parse_tools(value: Any, dropped: list[str]) -> tuple[Tool, ...]:
    """Return the declared functions. Appends the paths of tools that only Google runs to `dropped`."""
    tools: list[Tool] = []
    for index, item in enumerate([] if value is None else expect_list(value, "tools")):
        at = f"tools[{index}]"
        tool = in_camel(expect_object(item, at), _TOOLS)
        for kind in given(tool):
            if kind == FUNCTIONS:
                functions = expect_list(tool[kind], f"{at}.{kind}")
                tools += [_function(each, f"{at}.{kind}[{k}]", dropped) for k, each in enumerate(functions)]
            elif kind in HOSTED_TOOLS:
                dropped.append(HostedTool.at(at, kind))
            else:
                raise _unsupported_tool(kind, at)
    return tuple(tools)


def _unsupported_tool(kind: str, at: str) -> UnsupportedParameter:
    path = f"{at}.{kind[:MOST_SHOWN]}"
    way = "declare its functions in 'functionDeclarations'" if kind in REFUSED_TOOLS else "leave it out"
    return UnsupportedParameter(f"'{at}' has the tool {brief(kind)}, which is not supported; {way}", param=path)


def _function(value: Any, at: str, dropped: list[str]) -> Tool:
    function = in_camel(expect_object(value, at), DECLARED | IGNORED_DECLARED)
    dropped += (f"{at}.{name}" for name in given(function) if name not in DECLARED)
    schema, plain = function.get("parameters"), function.get("parametersJsonSchema")
    if schema is not None and plain is not None:
        raise InvalidRequest(f"'{at}' has 'parameters' and 'parametersJsonSchema'; give one of them", param=at)
    if plain is not None:
        parameters = dict(expect_object(plain, f"{at}.parametersJsonSchema"))
    else:
        parameters = {} if schema is None else json_schema(schema, f"{at}.parameters")
    name = expect_str(function.get("name"), f"{at}.name")
    return Tool(name, optional_str(function, "description", f"{at}.") or "", parameters)


def parse_tool_choice(value: Any, tools: tuple[Tool, ...], dropped: list[str]) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return the choice, and the tools that the model sees: with several allowed names, only these."""
    config = in_camel({} if value is None else expect_object(value, "toolConfig"), CONFIG | IGNORED_CONFIG)
    dropped += (f"toolConfig.{name}" for name in given(config) if name not in CONFIG)
    calling = config.get("functionCallingConfig")
    choice = in_camel({} if calling is None else expect_object(calling, _AT), CHOICE | IGNORED_CHOICE)
    dropped += (f"{_AT}.{name}" for name in given(choice) if name not in CHOICE)
    named = optional_str(choice, "mode", f"{_AT}.") or "AUTO"
    if (mode := _MODES.get(named.upper())) is None:
        raise InvalidRequest(f"'{_AT}.mode' must be one of {', '.join(_MODES)}", param=f"{_AT}.mode")
    if named.upper() == "VALIDATED":
        dropped.append(f"{_AT}.mode VALIDATED")  # calls may have any arguments, as with AUTO
    allowed = _allowed(choice, named.upper(), tools)
    if mode is ToolChoiceMode.REQUIRED and not tools:
        raise InvalidRequest(f"'{_AT}.mode' is ANY, but 'tools' declares no function", param=f"{_AT}.mode")
    if mode is ToolChoiceMode.REQUIRED and len(allowed) == 1:
        return ToolChoice(ToolChoiceMode.NAMED, allowed[0]), tools
    return ToolChoice(mode), tuple(tool for tool in tools if tool.name in allowed) if allowed else tools


def _allowed(choice: Mapping[str, Any], mode: str, tools: tuple[Tool, ...]) -> list[str]:
    at = f"{_AT}.allowedFunctionNames"
    value = choice.get("allowedFunctionNames")
    names = [expect_text(each, f"{at}[{k}]") for k, each in enumerate(expect_list(value, at) if value else [])]
    if names and mode not in ("ANY", "VALIDATED"):
        raise InvalidRequest(f"'{at}' needs the mode ANY or VALIDATED, not {mode}", param=at)
    for name in names:
        if all(tool.name != name for tool in tools):
            raise InvalidRequest(f"'{at}' has {brief(name)}, which 'tools' does not declare", param=at)
    return names
