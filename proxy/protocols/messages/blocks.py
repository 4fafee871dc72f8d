"""One message of the Messages API <-> `Message`s. What a reply of ours becomes on the wire comes back as it was.

Only the text of a block is ever read, so that `cache_control`, citations and the like cannot reach a prompt.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from typing import Any

import orjson

from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_str
from proxy.types import Message, Role, ToolCall

# Claude Code's first system block; its end changes from request to request.
BILLING_HEADER = "x-anthropic-billing-header:"
_SIGNATURE_MARK = "tokengrove:"
# The one key of a `tool_use.input` whose arguments are no JSON object: the API knows only objects there.
RAW_ARGUMENTS = "_raw"
# The one key under which Claude Code sends back arguments that it could not parse: {"raw": text, "len": its length}.
_UNPARSED = "__unparsedToolInput"


def parse_system(value: Any, dropped: list[str]) -> tuple[Message, ...]:
    """The `system` field as one leading message, or none.

    Blocks are joined without anything between: a client that splits a block elsewhere in its next turn, as clients do
    to move a `cache_control`, still sends the same system message.
    """
    texts: list[str] = []
    for block, name in _blocks(value, "system"):
        text = _text_of(block, name)
        if text.startswith(BILLING_HEADER):
            dropped.append(f"{name} ({BILLING_HEADER[:-1]})")
            # A gateway may have joined all blocks into one string; only the header is to go.
            text = text.partition("\n")[2].lstrip("\n") if isinstance(value, str) else ""
        texts.append(text)
    text = "".join(texts)
    return (Message(Role.SYSTEM, text),) if text else ()


def parse_message(value: Any, name: str, dropped: list[str]) -> list[Message]:
    """A message as those that it stands for: tool results become messages of their own, before the user's text.

    Adds the paths of what is left aside to `dropped`. Raises InvalidRequest with the path of the field at fault.
    """
    message = expect_object(value, name)
    content, at = message.get("content"), f"{name}.content"
    match message.get("role"):
        case "user":
            return _parse_user(content, at, dropped)
        case "assistant":
            return [_parse_assistant(content, at, dropped)]
        case "system":
            return [Message(Role.SYSTEM, "".join(_text_of(block, path) for block, path in _blocks(content, at)))]
        case _:
            raise InvalidRequest(f"'{name}.role' must be user, assistant or system", param=f"{name}.role")


def signature_of(interaction_id: str) -> str:
    """The signature of a thinking block: opaque to clients, which send it back as it is."""
    return base64.b64encode(f"{_SIGNATURE_MARK}{interaction_id}".encode()).decode()


def origin_of(signature: Any) -> str | None:
    """The interaction that a signature is from, None for a signature of anybody else's."""
    try:
        text = base64.b64decode(signature, validate=True).decode() if isinstance(signature, str) else ""
    except ValueError:
        return None
    return text.removeprefix(_SIGNATURE_MARK) if text.startswith(_SIGNATURE_MARK) else None


def input_of(arguments: str) -> dict[str, Any]:
    """The arguments of a call as `tool_use.input`; text that is no JSON object goes into `_raw` as it is."""
    parsed = _object_in(arguments) if arguments.strip() else {}
    return {RAW_ARGUMENTS: arguments} if parsed is None else parsed


def arguments_of(tool_input: Mapping[str, Any], name: str) -> str:
    """The JSON text of a `tool_use.input`, undoing `input_of` and what clients do to arguments that are no JSON."""
    raw = _raw_arguments(tool_input)
    if raw is not None and _object_in(raw) is None:
        return raw
    try:
        return _json_text(tool_input)
    except RecursionError:
        raise InvalidRequest(f"'{name}' is nested too deeply", param=name) from None


def _raw_arguments(tool_input: Mapping[str, Any]) -> str | None:
    """The text that stands for itself; a text that the client cut short does not."""
    if len(tool_input) != 1:
        return None
    unparsed = tool_input.get(_UNPARSED)
    raw = tool_input.get(RAW_ARGUMENTS)
    if isinstance(unparsed, Mapping):
        raw = unparsed.get("raw")
        if isinstance(raw, str) and unparsed.get("len") not in (None, len(raw)):
            return None
    return raw if isinstance(raw, str) else None


def _json_text(value: Mapping[str, Any]) -> str:
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError:  # what JSON can say and orjson cannot: integers beyond 64 bits, lone surrogates
        return json.dumps(value)


def _object_in(text: str) -> dict[str, Any] | None:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _blocks(content: Any, name: str) -> list[tuple[Mapping[str, Any], str]]:
    """The blocks of a content, each with its path. A string stands for one text block, null and absent for none."""
    if content is None:
        return []
    if isinstance(content, str):
        return [({"type": "text", "text": content}, name)]
    blocks = []
    for index, block in enumerate(expect_list(content, name)):
        path = f"{name}[{index}]"
        blocks.append((expect_object(block, path), path))
    return blocks


def _text_of(block: Mapping[str, Any], name: str) -> str:
    if block.get("type") != "text":
        raise _refusal(block, name)
    return expect_str(block.get("text"), f"{name}.text")


def _refusal(block: Mapping[str, Any], name: str) -> InvalidRequest:
    kind = block.get("type")
    if not isinstance(kind, str):
        return InvalidRequest(f"'{name}.type' is missing", param=f"{name}.type")
    return UnsupportedParameter(
        f"'{name}' has type {kind!r}, which is not taken here: the model takes text", param=name
    )


def _parse_user(content: Any, name: str, dropped: list[str]) -> list[Message]:
    """Results first, whatever the order of the blocks: they belong right after the calls that they answer."""
    results: list[Message] = []
    texts: list[str] = []
    for block, path in _blocks(content, name):
        if block.get("type") == "tool_result":
            results.append(_parse_result(block, path, dropped))
        else:
            texts.append(_text_of(block, path))
    text = "".join(texts)
    return [*results, Message(Role.USER, text)] if text or not results else results


def _parse_result(block: Mapping[str, Any], name: str, dropped: list[str]) -> Message:
    """A result has no mark of failure anywhere else, so a failed one without a text says `error`."""
    texts = []
    for part, path in _blocks(block.get("content"), f"{name}.content"):
        if part.get("type") == "tool_reference":  # names a tool with `defer_loading`: those are dropped
            dropped.append(path)
        else:
            texts.append(_text_of(part, path))
    text = "".join(texts)
    if not text and block.get("is_error") is True:
        text = "error"
    return Message(Role.TOOL, text, tool_call_id=expect_str(block.get("tool_use_id"), f"{name}.tool_use_id"))


def _parse_assistant(content: Any, name: str, dropped: list[str]) -> Message:
    """All blocks as one message, whatever their order: it is how the answer was stored."""
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[ToolCall] = []
    origin: str | None = None
    for block, path in _blocks(content, name):
        match block.get("type"):
            case "thinking":
                thoughts.append(optional_str(block, "thinking", f"{path}.") or "")
                origin = origin_of(block.get("signature")) or origin
            case "redacted_thinking":
                dropped.append(path)
            case "tool_use":
                calls.append(_parse_call(block, path))
            case _:
                texts.append(_text_of(block, path))
    reasoning = "".join(thoughts) or None
    return Message(Role.ASSISTANT, "".join(texts), tuple(calls), reasoning=reasoning, origin=origin)


def _parse_call(block: Mapping[str, Any], name: str) -> ToolCall:
    tool_input = block.get("input")
    return ToolCall(
        id=expect_str(block.get("id"), f"{name}.id"),
        name=expect_str(block.get("name"), f"{name}.name"),
        arguments=arguments_of(
            {} if tool_input is None else expect_object(tool_input, f"{name}.input"), f"{name}.input"
        ),
    )
