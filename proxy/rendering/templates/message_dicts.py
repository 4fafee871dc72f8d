"""Converts messages and tools into the dicts that chat templates and the `renderers` package read.

Nothing that a template could write is lost: a result names its call, and arguments that are an object become a dict.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from proxy.rendering.templates.call_ids import CallIds, rewritten_ids
from proxy.types import ImagePart, Message, Role, Tool, ToolCall

MessageDict = dict[str, Any]


class Arguments(StrEnum):
    """The form that a template requires for the arguments of a call: a JSON object, or its text."""

    OBJECT = "object"
    STRING = "string"


def to_dicts(
    messages: Sequence[Message], arguments: Arguments = Arguments.OBJECT, ids: CallIds = CallIds.GIVEN
) -> list[MessageDict]:
    """Convert messages to dicts. Tool results get the name of their call, and call ids the style `ids`."""
    names: dict[str, str] = {}
    written = {} if ids is CallIds.GIVEN else rewritten_ids(messages, ids)
    out = []
    for message in messages:
        for call in message.tool_calls:
            names[call.id] = call.name
        out.append(_to_dict(message, names, written, arguments))
    return out


def _to_dict(
    message: Message, names: Mapping[str, str], written: Mapping[str, str], arguments: Arguments
) -> MessageDict:
    out: MessageDict = {"role": str(message.role), "content": message.content}
    if message.images:
        out["content"] = content_parts(message.content, message.images)
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [_call_dict(call, written, arguments) for call in message.tool_calls]
    if message.role is Role.TOOL:
        known = message.tool_call_id
        if known is not None:
            out["tool_call_id"] = written.get(known, known)
        name = message.name or names.get(known or "")
        if name is not None:
            out["name"] = name
    return out


def content_parts(content: str, images: Sequence[ImagePart] = ()) -> list[dict[str, str]]:
    """Return the content of a message with images in the form that templates read: a list of parts."""
    parts, before = list[dict[str, str]](), 0
    for image in images:
        if text := content[before : image.at]:
            parts.append({"type": "text", "text": text})
        parts.append({"type": "image"})
        before = image.at
    if text := content[before:]:
        parts.append({"type": "text", "text": text})
    return parts


def _call_dict(call: ToolCall, written: Mapping[str, str], arguments: Arguments) -> dict[str, Any]:
    # Some clients send an empty string for a call without arguments.
    value: Any = call.arguments if call.arguments.strip() else "{}"
    if arguments is Arguments.OBJECT:
        value = _parsed_object(value)
    shown = written.get(call.id, call.id)
    return {"id": shown, "type": "function", "function": {"name": call.name, "arguments": value}}


def _parsed_object(text: str) -> Any:
    """Return the JSON object in `text`, or the text itself if it is not one (some templates write it unchanged)."""
    try:
        value = _without_lone_surrogates(text, json.loads(text))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def _without_lone_surrogates(text: str, value: Any) -> Any:
    """Replace lone surrogates with U+FFFD: JSON can escape them, but they have no UTF-8 encoding."""
    if "\\ud" not in text.lower():
        return value
    whole = json.dumps(value, ensure_ascii=False).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return json.loads(whole)


def tool_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Convert tools to OpenAI's form, in the key order of Hugging Face's own schemas; None without tools."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": dict(tool.parameters) or {"type": "object", "properties": {}},
            },
        }
        for tool in tools
    ] or None
