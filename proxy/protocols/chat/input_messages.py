"""Parses chat messages. Clients write the same message in several ways; all of them give the same `Message`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.parsed_items import FEWEST, ParsedBodies, ParsedItems
from proxy.protocols.custom_tools import arguments_of
from proxy.protocols.fields import expect_list, expect_object, expect_str, json_type
from proxy.protocols.openai_types import CHAT_PARTS, part_error
from proxy.protocols.parts import Images, image_of, joined
from proxy.protocols.tool_results import link_tool_results
from proxy.types import Api, ImagePart, Message, Role, ToolCall
from tokengrove.errors import InvalidRequest

# Looked up once: in Python 3.11, finding an enum member takes as long as making a message.
_SYSTEM, _USER, _ASSISTANT, _TOOL = Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL
_ROLES = {
    **{"system": _SYSTEM, "developer": _SYSTEM, "user": _USER, "assistant": _ASSISTANT, "tool": _TOOL},
    "function": _TOOL,  # the result of a legacy `function_call`
}
_PLAIN_ROLES = {name: role for name, role in _ROLES.items() if role is not _TOOL}
_PLAIN_FIELDS = 2
_OTHER_FIELDS = Message(_USER)[_PLAIN_FIELDS:]


def parse_messages(values: list[Any], bodies: ParsedBodies | None = None) -> tuple[Message, ...]:
    """Parse the messages of a conversation with `parse_message`, and link tool results to their calls.

    `bodies`: the parsed items of earlier bodies of the session. Raises InvalidRequest with the path of the field.
    """
    parsed: list[Message] = []
    if bodies is not None and len(values) >= FEWEST:
        parsed = bodies.setdefault(Api.CHAT, ParsedItems()).read(values, parsed, _parse_from)
    elif _parse_from(parsed, values):
        return tuple(parsed)
    return tuple(link_tool_results(parsed))


def _parse_from(parsed: list[Message], values: list[Any], start: int = 0) -> bool:
    """Append the messages from index `start` on. Return whether each has only a role and a text and is no tool result.

    Parsing such messages calls no Python function.
    """
    plain = True
    for index, value in enumerate(values[start:] if start else values, start):
        if (
            type(value) is dict
            and len(value) == _PLAIN_FIELDS
            and type(text := value.get("content")) is str
            and type(name := value.get("role")) is str
            and (role := _PLAIN_ROLES.get(name)) is not None
        ):
            parsed.append(tuple.__new__(Message, (role, text) + _OTHER_FIELDS))  # noqa: RUF005 (unpacking is slower)
        else:
            plain = False
            parsed.append(parse_message(value, f"messages[{index}]"))
    return plain


def parse_message(value: Any, name: str) -> Message:
    """Parse a message of any role. Raises InvalidRequest with the path of the field."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{name}' must be an object, not {json_type(value)}", param=name)
    role_name = value.get("role")
    role = _ROLES.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise InvalidRequest(f"'{name}.role' must be one of {', '.join(_ROLES)}", param=f"{name}.role")
    content, thoughts = value.get("content"), None
    if role is _ASSISTANT and type(content) is list:
        content, thoughts = _without_thoughts(content, f"{name}.content")
    images: Images = ()
    if isinstance(content, str):
        text = content
    else:
        text, images = _parse_content(content, f"{name}.content")
    if role is _USER or role is _SYSTEM:
        return Message(role, text, images=images)
    if role is _TOOL:
        called, named = _answered_call(value, name), _optional_str(value, "name", name)
        return Message(role, text, tool_call_id=called, name=named, images=images)
    if (refusal := value.get("refusal")) is not None:
        refusal = expect_str(refusal, f"{name}.refusal")
        text = text or refusal
    reasoning = _parse_reasoning(value) or thoughts
    return Message(role, text, tool_calls=_parse_calls(value, name), reasoning=reasoning, images=images)


def _without_thoughts(parts: list[Any], name: str) -> tuple[list[Any], str | None]:
    """Separate reasoning from the other parts of an answer: some clients send it as a part, as in other APIs.

    Empty texts replace it, so that the other parts keep their index.
    """
    rest: list[Any] = []
    thoughts: list[str] = []
    for index, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("thinking", "reasoning"):
            value = part.get(kind, part.get("text"))
            thoughts.append(value if isinstance(value, str) else _parse_content(value, f"{name}[{index}].{kind}")[0])
        rest.append("" if kind in ("thinking", "reasoning", "redacted_thinking") else part)
    return rest, "".join(thoughts) or None


def _parse_content(content: Any, name: str) -> tuple[str, Images]:
    if content is None:
        return "", ()
    parts = [_parse_part(part, f"{name}[{index}]") for index, part in enumerate(expect_list(content, name))]
    try:
        return "".join(parts), ()  # type: ignore[arg-type]
    except TypeError:
        return joined(parts)


def _parse_part(part: Any, name: str) -> str | ImagePart:
    if isinstance(part, str):
        return part
    kind = expect_object(part, name).get("type", "text")
    if kind == "text":
        return expect_str(part.get("text"), f"{name}.text")
    if kind == "refusal":
        return expect_str(part.get("refusal"), f"{name}.refusal")
    if (image := image_of(part)) is not None:
        return image
    raise part_error(kind, name, CHAT_PARTS)


def _optional_str(value: Mapping[str, Any], key: str, name: str) -> str | None:
    item = value.get(key)
    return None if item is None else expect_str(item, f"{name}.{key}")


def _answered_call(value: Mapping[str, Any], name: str) -> str | None:
    """Return the id of the call that a tool message answers, under either name; None: the order decides."""
    return _optional_str(value, "tool_call_id", name) or _optional_str(value, "id", name)


def _parse_calls(value: Mapping[str, Any], name: str) -> tuple[ToolCall, ...]:
    """Parse the calls of an assistant message, from `tool_calls` or one legacy `function_call`.

    A legacy call has no id: its place in the conversation serves as its id, so that its result can refer to it.
    """
    listed, legacy = value.get("tool_calls"), value.get("function_call")
    calls = () if listed is None else _parse_tool_calls(listed, f"{name}.tool_calls")
    if legacy is None:
        return calls
    called = _parse_function(legacy, f"{name}.function_call", call_id=f"function_call:{name}")
    if not calls:
        return (called,)
    if all(call[1:] != called[1:] for call in calls):
        message = f"'{name}' has a 'function_call' that is not among its 'tool_calls'; send it as one of them"
        raise InvalidRequest(message, param=f"{name}.function_call")
    return calls


def _parse_tool_calls(value: Any, name: str) -> tuple[ToolCall, ...]:
    return tuple(_parse_tool_call(call, f"{name}[{index}]") for index, call in enumerate(expect_list(value, name)))


def _parse_tool_call(value: Any, name: str) -> ToolCall:
    call = expect_object(value, name)
    if call.get("type") == "custom":
        custom = expect_object(call.get("custom"), f"{name}.custom")
        text = expect_str(custom.get("input"), f"{name}.custom.input")
        called = _optional_str(call, "id", name) or ""
        return ToolCall(called, expect_str(custom.get("name"), f"{name}.custom.name"), arguments_of(text))
    return _parse_function(call.get("function"), f"{name}.function", call_id=_optional_str(call, "id", name) or "")


def _parse_function(value: Any, name: str, call_id: str) -> ToolCall:
    function = expect_object(value, name)
    return ToolCall(
        id=call_id,
        name=expect_str(function.get("name"), f"{name}.name"),
        arguments=_optional_str(function, "arguments", name) or "",
    )


def _parse_reasoning(value: Mapping[str, Any]) -> str | None:
    for key in ("reasoning_content", "reasoning"):
        if isinstance(value.get(key), str):
            return str(value[key])
    details = value.get("reasoning_details")
    if isinstance(details, list):
        texts = [part.get("text") for part in details if isinstance(part, dict)]
        return "".join(text for text in texts if isinstance(text, str)) or None
    return None
