"""The `tool_choice` of the OpenAI APIs: a mode, a function, or the functions that are allowed.

The chat API nests a function's name and the list of allowed functions in an object; the responses API does not. Clients
mix the two forms, so both APIs accept both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_str
from proxy.types import Tool, ToolChoice, ToolChoiceMode
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

_AUTO = ToolChoice()
_MODES = ("auto", "none", "required")
_NO_TYPES: Mapping[str, str] = {}


def parse_tool_choice(
    value: Any, functions: tuple[Tool, ...], types: Mapping[str, str] = _NO_TYPES
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    """Return the choice, and the functions that the model sees: with `allowed_tools`, only the allowed ones.

    `types`: the name of the function for each type of tool without a name. Raises UnsupportedParameter for a tool that
    is no function of the client, and InvalidRequest for one missing from `functions`.
    """
    if value is None:
        return _AUTO, functions
    if isinstance(value, str):
        return _checked(ToolChoice(_parse_mode(value, "tool_choice")), functions), functions
    wanted = expect_object(value, "tool_choice")
    if (kind := wanted.get("type")) in _MODES:  # the form of the Messages API
        return parse_tool_choice(kind, functions)
    if kind == "allowed_tools":
        return _parse_allowed(wanted, functions, types)
    choice = ToolChoice(ToolChoiceMode.NAMED, _function_name(wanted, "tool_choice", types))
    return _checked(choice, functions), functions


def _checked(choice: ToolChoice, functions: Sequence[Tool]) -> ToolChoice:
    """Return `choice` if `functions` can satisfy it. Raises InvalidRequest if it forces a missing function."""
    if choice.mode is ToolChoiceMode.REQUIRED and not functions:
        raise InvalidRequest("'tool_choice' is required, but 'tools' has no function", param="tool_choice")
    if choice.name is not None and all(function.name != choice.name for function in functions):
        raise InvalidRequest(f"'tool_choice' names {brief(choice.name)}, which is not in 'tools'", param="tool_choice")
    return choice


def _parse_mode(value: str, name: str) -> ToolChoiceMode:
    if value not in _MODES:
        raise InvalidRequest(f"'{name}' must be auto, none, required or an object, not {brief(value)}", param=name)
    return ToolChoiceMode(value)


def _parse_allowed(
    wanted: Mapping[str, Any], functions: tuple[Tool, ...], types: Mapping[str, str]
) -> tuple[ToolChoice, tuple[Tool, ...]]:
    at = "tool_choice"
    if (nested := wanted.get("allowed_tools")) is not None:
        at = "tool_choice.allowed_tools"
        wanted = expect_object(nested, at)
    mode = _parse_mode(optional_str(wanted, "mode", f"{at}.") or "auto", f"{at}.mode")
    listed = expect_list(wanted.get("tools"), f"{at}.tools")
    names = {
        _function_name(expect_object(item, f"{at}.tools[{index}]"), f"{at}.tools[{index}]", types)
        for index, item in enumerate(listed)
    }
    for name in sorted(names - {function.name for function in functions}):
        _checked(ToolChoice(ToolChoiceMode.NAMED, name), functions)
    allowed = tuple(function for function in functions if function.name in names)
    if mode is ToolChoiceMode.REQUIRED and len(allowed) == 1:  # forcing the function leaves the prompt unchanged
        return ToolChoice(ToolChoiceMode.NAMED, allowed[0].name), functions
    return _checked(ToolChoice(mode), allowed), allowed


def _function_name(wanted: Mapping[str, Any], name: str, types: Mapping[str, str]) -> str:
    kind = optional_str(wanted, "type", f"{name}.") or "function"
    if kind in types:
        return types[kind]
    if kind not in ("function", "custom"):
        message = f"'{name}' names a tool of type {brief(kind)}; this server supports tools that the client runs"
        raise UnsupportedParameter(message, param=name)
    if (function := wanted.get(kind)) is not None:
        return expect_str(expect_object(function, f"{name}.{kind}").get("name"), f"{name}.{kind}.name")
    return expect_str(wanted.get("name"), f"{name}.name")
