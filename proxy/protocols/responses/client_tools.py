"""Tools that OpenAI defines and clients run: shell, local_shell, apply_patch, computer, tool_search, custom tools.

A request names them by type, without a schema, because OpenAI's models know them. To other models, each is a function
with a description and a schema. A call of this function is sent to the client as an item of the tool's own type, which
holds the arguments as sampled; in a history, the item is a call with these arguments again, so that a turn continues
the sampled tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from proxy.protocols.custom_tools import arguments_of, custom_tool, input_of
from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_int, optional_object, optional_str
from proxy.types import Tool, ToolCall

Fields = dict[str, Any]
Definition = Mapping[str, Any]

_RAW = "raw_arguments"
"""The field of an action that holds arguments which are no JSON object, as text."""


class ClientTool(NamedTuple):
    """How a tool becomes a function and back.

    `describe(definition, path)`: the function. `prefix`: of the ids of call items. `fields(arguments)`: the fields of a
    call item, from the arguments of a call. `arguments(item, path)`: the inverse.
    """

    describe: Callable[[Definition, str], Tool]
    call: str
    prefix: str
    fields: Callable[[str], Fields]
    arguments: Callable[[Mapping[str, Any], str], str]


def client_tool(definition: Definition, name: str) -> Tool | None:
    """Return the function for the tool at the path `name`; None if it is none that clients run.

    Raises InvalidRequest with the path of a field.
    """
    known = _KNOWN.get(definition.get("type", ""))
    if known is None or _is_hosted(definition, name):
        return None
    return known.describe(definition, name)


def call_fields(call: ToolCall, definition: Definition) -> Fields:
    """Return the item of a call of the tool with this definition, without its id and status."""
    known = _KNOWN[definition["type"]]
    item = {"type": known.call, "call_id": call.id, **known.fields(call.arguments)}
    return {**item, "name": call.name} if definition["type"] == "custom" else item


def id_prefix(definition: Definition) -> str:
    """Return the beginning of the ids of call items."""
    return _KNOWN[definition["type"]].prefix


def parse_client_call(item: Mapping[str, Any], kind: str, name: str) -> ToolCall:
    """Return the call in the item of type `kind` at the path `name`. Raises InvalidRequest with the path of a field."""
    function, known = _CALLS[kind]
    at = f"{name}."
    called = optional_str(item, "call_id", at) or optional_str(item, "id", at) or ""
    if kind == "custom_tool_call":
        function = expect_str(item.get("name"), f"{name}.name")
    return ToolCall(called, function, known.arguments(item, name))


def shell_text(item: Mapping[str, Any], name: str) -> str:
    """Return the text of a `shell_call_output`: for each command its stdout, its stderr and how it ended."""
    if isinstance(item.get("output"), str):
        return str(item["output"])
    texts: list[str] = []
    for index, value in enumerate(expect_list(item.get("output"), f"{name}.output")):
        at = f"{name}.output[{index}]"
        part = expect_object(value, at)
        texts += (optional_str(part, stream, f"{at}.") or "" for stream in ("stdout", "stderr"))
        outcome = optional_object(part, "outcome")
        if outcome.get("type") == "timeout":
            texts.append("[timed out]")
        elif (code := optional_int(outcome, "exit_code", least=-(2**31), at=f"{at}.outcome.")) is not None:
            texts.append(f"[exit code {code}]")
    return "\n".join(text.removesuffix("\n") for text in texts if text)


def patch_text(item: Mapping[str, Any], name: str) -> str:
    """Return the text of an `apply_patch_call_output`: its output, and whether the patch was applied."""
    status = expect_str(item.get("status"), f"{name}.status")
    return "\n".join(filter(None, (optional_str(item, "output", f"{name}."), f"[{status}]")))


def loaded_text(item: Mapping[str, Any], name: str) -> str:
    """Return the text of a `tool_search_output`: the definitions of the tools that it found, as JSON."""
    return _json(expect_list(item.get("tools"), f"{name}.tools"))


def _is_hosted(definition: Definition, name: str) -> bool:
    """Whether a provider runs a tool that clients may also run."""
    if definition["type"] == "shell":
        return bool(optional_object(definition, "environment").get("type", "local") != "local")
    return definition["type"] == "tool_search" and definition.get("execution") != "client"


def _shell(definition: Definition, name: str) -> Tool:
    commands = {"type": "array", "items": {"type": "string"}, "description": "The commands, which run in order."}
    return Tool(
        "shell",
        "Run shell commands. The result has the stdout, the stderr and the exit code of each.",
        _object(
            {
                "commands": commands,
                "timeout_ms": _integer("The longest time that the commands may take, in milliseconds."),
                "max_output_length": _integer("The greatest number of characters of output to return."),
            },
            "commands",
        ),
    )


def _local_shell(definition: Definition, name: str) -> Tool:
    command = {"type": "array", "items": {"type": "string"}, "description": 'The words, as ["bash", "-lc", "ls"].'}
    return Tool(
        "local_shell",
        "Run a command on the user's machine.",
        _object(
            {
                "command": command,
                "working_directory": _text("The folder in which it runs."),
                "timeout_ms": _integer("The longest time that it may take, in milliseconds."),
                "user": _text("The user as whom it runs."),
            },
            "command",
        ),
    )


def _apply_patch(definition: Definition, name: str) -> Tool:
    return Tool(
        "apply_patch",
        "Create, update or delete a file. In `diff`, each line begins with `+` (new), `-` (removed) or a space (kept); "
        "to create a file, all begin with `+`. A line `@@`, or `@@` and a line of the file, begins each changed part.",
        _object(
            {
                "type": _one_of("create_file", "update_file", "delete_file", about="What to do."),
                "path": _text("The path of the file."),
                "diff": _text("The change; none to delete a file."),
            },
            "type",
            "path",
        ),
    )


_ACTIONS = ("click", "double_click", "drag", "keypress", "move", "screenshot", "scroll", "type", "wait")
_NUMBER = {"type": "integer"}
_ACTION_FIELDS: Fields = {
    "type": {"type": "string", "enum": list(_ACTIONS), "description": "What to do."},
    "x": {"type": "integer", "description": "Pixels from the left edge of the screen."},
    "y": {"type": "integer", "description": "Pixels from the top edge of the screen."},
    "button": {"type": "string", "enum": ["left", "right", "wheel", "back", "forward"], "description": "Of `click`."},
    "path": {
        "type": "array",
        "items": {"type": "object", "properties": {"x": _NUMBER, "y": _NUMBER}, "required": ["x", "y"]},
        "description": "The points of `drag`.",
    },
    "keys": {"type": "array", "items": {"type": "string"}, "description": "The keys of `keypress`, or held ones."},
    "scroll_x": {"type": "integer", "description": "Pixels that `scroll` scrolls to the right."},
    "scroll_y": {"type": "integer", "description": "Pixels that `scroll` scrolls down."},
    "text": {"type": "string", "description": "The text of `type`."},
}


def _computer(definition: Definition, name: str) -> Tool:
    about = "Use the mouse and the keyboard of a computer. The result is a screenshot."
    action = _object(_ACTION_FIELDS, "type")
    if definition["type"] == "computer":
        actions = {"type": "array", "items": action, "description": "What to do, in order."}
        return Tool("computer", about, _object({"actions": actions}, "actions"))
    sizes = [optional_int(definition, f"display_{side}", least=1, at=f"{name}.") for side in ("width", "height")]
    if None not in sizes:
        about = f"{about} The screen has {sizes[0]} x {sizes[1]} pixels."
    return Tool("computer", about, action)


def _tool_search(definition: Definition, name: str) -> Tool:
    return Tool(
        "tool_search",
        optional_str(definition, "description", f"{name}.") or "Search for tools. The result defines those that fit.",
        optional_object(definition, "parameters"),
    )


def _object(properties: Fields, *required: str) -> Fields:
    return {"type": "object", "properties": properties, "required": list(required)}


def _text(about: str) -> Fields:
    return {"type": "string", "description": about}


def _integer(about: str) -> Fields:
    return {"type": "integer", "description": about}


def _one_of(*values: str, about: str) -> Fields:
    return {"type": "string", "enum": list(values), "description": about}


def _value(arguments: str) -> Fields:
    """Return the arguments of a call as an object."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {_RAW: arguments}


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # integers beyond 64 bits, depth
        return json.dumps(value, ensure_ascii=False)


def _arguments(value: Mapping[str, Any]) -> str:
    """Return arguments as JSON text: the inverse of `_value`."""
    if value.keys() == {_RAW} and isinstance(value[_RAW], str):
        return str(value[_RAW])
    return _json(value)


def _in_field(field: str) -> Callable[[Mapping[str, Any], str], str]:
    return lambda item, name: _arguments(expect_object(item.get(field), f"{name}.{field}"))


def _exec_fields(arguments: str) -> Fields:
    return {"action": {"type": "exec", "env": {}, **_value(arguments)}}


def _exec_arguments(item: Mapping[str, Any], name: str) -> str:
    action = expect_object(item.get("action"), f"{name}.action")
    return _arguments({key: value for key, value in action.items() if key != "type" and (key != "env" or value)})


def _action_fields(arguments: str) -> Fields:
    return {"action": _value(arguments), "pending_safety_checks": []}


def _actions_fields(arguments: str) -> Fields:
    value = _value(arguments)
    actions = {"actions": value["actions"]} if value.keys() == {"actions"} else {"action": value}
    return {**actions, "pending_safety_checks": []}


def _computer_arguments(item: Mapping[str, Any], name: str) -> str:
    """The arguments are the action, or the actions of newer models."""
    if item.get("action") is None:
        return _json({"actions": expect_list(item.get("actions"), f"{name}.actions")})
    return _arguments(expect_object(item["action"], f"{name}.action"))


def _search_arguments(item: Mapping[str, Any], name: str) -> str:
    value = item.get("arguments")
    return value if isinstance(value, str) else _arguments(expect_object(value, f"{name}.arguments"))


_KNOWN: Mapping[str, ClientTool] = {
    "shell": ClientTool(
        _shell,
        "shell_call",
        "sh",
        lambda text: {"action": _value(text), "environment": {"type": "local"}},
        _in_field("action"),
    ),
    "local_shell": ClientTool(_local_shell, "local_shell_call", "lsh", _exec_fields, _exec_arguments),
    "apply_patch": ClientTool(
        _apply_patch, "apply_patch_call", "apc", lambda text: {"operation": _value(text)}, _in_field("operation")
    ),
    "computer": ClientTool(_computer, "computer_call", "cu", _actions_fields, _computer_arguments),
    "computer_use_preview": ClientTool(_computer, "computer_call", "cu", _action_fields, _computer_arguments),
    "tool_search": ClientTool(
        _tool_search,
        "tool_search_call",
        "tsc",
        lambda text: {"arguments": _value(text), "execution": "client"},
        _search_arguments,
    ),
    "custom": ClientTool(
        custom_tool,
        "custom_tool_call",
        "ctc",
        lambda text: {"input": input_of(text)},
        lambda item, name: arguments_of(expect_str(item.get("input"), f"{name}.input")),
    ),
}
_CALLS: Mapping[str, tuple[str, ClientTool]] = {
    tool.call: ("computer" if tool.call == "computer_call" else kind, tool) for kind, tool in _KNOWN.items()
}
CLIENT_CALLS = frozenset(_CALLS)
"""The types of call items."""

FUNCTIONS = {
    **{kind: kind for kind in _KNOWN if kind != "custom"},
    **dict.fromkeys(("computer_use", "computer_use_preview"), "computer"),
}
"""The function for each type that a tool choice may name without a name."""
