"""Parses messages of the Messages API into `Message`s. A replayed reply of ours gives its original message.

Only the text of a block is read, so `cache_control`, citations and other annotations are never in a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_str
from proxy.protocols.parts import Images, image_of, joined
from proxy.protocols.signatures import origin_of
from proxy.protocols.tool_inputs import arguments_of
from proxy.types import ImagePart, Message, Role, ToolCall
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

# The beginning of Claude Code's first system block. The block is dropped because its end changes with every request.
BILLING_HEADER = "x-anthropic-billing-header:"


def parse_system(value: Any, dropped: list[str]) -> tuple[Message, ...]:
    """Parse the `system` field into one leading message, or none.

    Blocks are joined without a separator: clients may split a block elsewhere in the next turn to move a
    `cache_control`, which must give the same system message.
    """
    texts: list[str] = []
    for block, name in _blocks(value, "system"):
        text = _text_of(block, name)
        if text.startswith(BILLING_HEADER):
            dropped.append(f"{name} ({BILLING_HEADER[:-1]})")
            # A gateway may have joined all blocks into one string; drop only the header's line.
            text = text.partition("\n")[2].lstrip("\n") if isinstance(value, str) else ""
        texts.append(text)
    text = "".join(texts)
    return (Message(Role.SYSTEM, text),) if text else ()


def parse_message(value: Any, name: str, dropped: list[str]) -> list[Message]:
    """Parse one message into one or more: tool results become separate messages, before the user's text.

    Appends the paths of ignored blocks to `dropped`. Raises InvalidRequest with the path of the field.
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


def _blocks(content: Any, name: str) -> list[tuple[Mapping[str, Any], str]]:
    """Return the blocks of a content, each with its path. A string counts as one text block, null as no block."""
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


def _part_of(block: Mapping[str, Any], name: str) -> str | ImagePart:
    if block.get("type") == "text":
        return expect_str(block.get("text"), f"{name}.text")
    if (image := image_of(block)) is not None:
        return image
    raise _refusal(block, name)


def _refusal(block: Mapping[str, Any], name: str) -> InvalidRequest:
    kind = block.get("type")
    if not isinstance(kind, str):
        return InvalidRequest(f"'{name}.type' is missing", param=f"{name}.type")
    if image_of(block) is not None:
        message = f"'{name}' is an image; only messages from the user, and tool results in them, may have images"
        return UnsupportedParameter(message, param=name)
    return UnsupportedParameter(
        f"'{name}' has type {brief(kind)}, which is not supported: the model accepts text only", param=name
    )


def _parse_user(content: Any, name: str, dropped: list[str]) -> list[Message]:
    """Parse a user message. Tool results come first, whatever the order of the blocks: they must follow their calls."""
    results: list[Message] = []
    parts: list[str | ImagePart] = []
    for block, path in _blocks(content, name):
        if block.get("type") == "tool_result":
            results.append(_parse_result(block, path, dropped))
        else:
            parts.append(_part_of(block, path))
    images: Images = ()
    try:
        text = "".join(parts)  # type: ignore[arg-type]
    except TypeError:
        text, images = joined(parts)
    return [*results, Message(Role.USER, text, images=images)] if text or images or not results else results


def _parse_result(block: Mapping[str, Any], name: str, dropped: list[str]) -> Message:
    """Parse a tool result. Chat templates have no failure flag, so a failed result without text becomes `error`."""
    parts: list[str | ImagePart] = []
    for part, path in _blocks(block.get("content"), f"{name}.content"):
        if part.get("type") == "tool_reference":  # it names a tool with `defer_loading`, which is dropped
            dropped.append(path)
        else:
            parts.append(_part_of(part, path))
    images: Images = ()
    try:
        text = "".join(parts)  # type: ignore[arg-type]
    except TypeError:
        text, images = joined(parts)
    if not text and not images and block.get("is_error") is True:
        text = "error"
    called = expect_str(block.get("tool_use_id"), f"{name}.tool_use_id")
    return Message(Role.TOOL, text, tool_call_id=called, images=images)


def _parse_assistant(content: Any, name: str, dropped: list[str]) -> Message:
    """Parse all blocks, in any order, into one message: the answer was stored as one."""
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
