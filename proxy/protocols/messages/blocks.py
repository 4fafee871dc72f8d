"""Parses messages of the Messages API into `Message`s. A replayed reply of ours gives its original message.

Only the content of a block is read, so `cache_control`, citations and other annotations are never in a prompt.
`accepted_types` says what becomes of each type of block.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_str
from proxy.protocols.messages.accepted_types import BLOCKS, Treatment
from proxy.protocols.messages.readable import (
    Part,
    browser_state_text,
    document_parts,
    result_parts,
    search_result_parts,
)
from proxy.protocols.messages.toolsets import called_function
from proxy.protocols.parts import Images, image_of, joined
from proxy.protocols.signatures import origin_of
from proxy.protocols.tool_inputs import arguments_of
from proxy.types import Message, Role, ToolCall
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

# The beginning of Claude Code's first system block. The block is dropped because its end changes with every request.
BILLING_HEADER = "x-anthropic-billing-header:"
_CALLS = frozenset({"tool_use", "server_tool_use", "mcp_tool_use"})
_IGNORED = frozenset(kind for kind, row in BLOCKS.items() if row.treatment is Treatment.IGNORED)
_OF_PROVIDERS = frozenset(kind for kind, row in BLOCKS.items() if row.treatment is Treatment.CONTEXT) - _CALLS
_READ = {"document": document_parts, "search_result": search_result_parts}
_USERS = ("text", "image", *_READ, "tool_result")
_RESULTS = ("text", "image", *_READ, "tool_reference", "browser_state")


class Notes(NamedTuple):
    """What the messages hold beside content. `dropped`: the paths of ignored blocks. `loaded`: the deferred tools that
    `tool_reference` blocks name, each with the path of its block.
    """

    dropped: list[str]
    loaded: list[tuple[str, str]]

    @classmethod
    def empty(cls) -> Notes:
        return cls([], [])

    def copy(self) -> Notes:
        return Notes(self.dropped.copy(), self.loaded.copy())


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


def parse_message(value: Any, name: str, notes: Notes) -> list[Message]:
    """Parse one message into one or more: tool results become separate messages, before the user's text.

    Adds to `notes`. Raises InvalidRequest with the path of the field.
    """
    message = expect_object(value, name)
    content, at = message.get("content"), f"{name}.content"
    match message.get("role"):
        case "user":
            return _parse_user(content, at, notes)
        case "assistant":
            return _parse_assistant(content, at, notes)
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
        raise _refusal(block, name, ("text",))
    return expect_str(block.get("text"), f"{name}.text")


def _parts_of(block: Mapping[str, Any], name: str, accepted: tuple[str, ...], notes: Notes) -> list[Part]:
    """The parts of a block that may stand in a message from the user and in a tool result."""
    kind = block.get("type")
    if kind == "text":
        return [expect_str(block.get("text"), f"{name}.text")]
    if (image := image_of(block)) is not None:
        return [image]
    if not isinstance(kind, str) or (read := _READ.get(kind)) is None:
        raise _refusal(block, name, accepted)
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled") is True:  # no model here can cite
        notes.dropped.append(f"{name}.citations")
    return read(block, name)


def _refusal(block: Mapping[str, Any], name: str, accepted: tuple[str, ...]) -> InvalidRequest:
    kind = block.get("type")
    if not isinstance(kind, str):
        return InvalidRequest(f"'{name}.type' is missing", param=f"{name}.type")
    if image_of(block) is not None:
        message = f"'{name}' is an image; only messages from the user, and tool results in them, may have images"
        return UnsupportedParameter(message, param=name)
    how = f": {row.how}" if (row := BLOCKS.get(kind)) is not None and row.treatment is Treatment.REFUSED else ""
    if kind == "image":
        how, accepted = ": the model accepts text only", tuple(one for one in accepted if one != "image")
    return UnsupportedParameter(
        f"'{name}' has type {brief(kind)}, which is not supported here{how}; accepted are {', '.join(accepted)}",
        param=name,
    )


def _parse_user(content: Any, name: str, notes: Notes) -> list[Message]:
    """Parse a user message. Tool results come first, whatever the order of the blocks: they must follow their calls."""
    results: list[Message] = []
    parts: list[Part] = []
    for block, path in _blocks(content, name):
        if block.get("type") == "tool_result":
            results.append(_parse_result(block, path, notes))
        else:
            parts += _parts_of(block, path, _USERS, notes)
    text, images = _joined(parts)
    return [*results, Message(Role.USER, text, images=images)] if text or images or not results else results


def _joined(parts: list[Part]) -> tuple[str, Images]:
    try:
        return "".join(parts), ()  # type: ignore[arg-type]
    except TypeError:
        return joined(parts)


def _parse_result(block: Mapping[str, Any], name: str, notes: Notes) -> Message:
    """Parse a tool result. Chat templates have no failure flag, so a failed result without text becomes `error`."""
    parts: list[Part] = []
    for part, path in _blocks(block.get("content"), f"{name}.content"):
        match part.get("type"):
            case "tool_reference":
                parts.append(_reference(part, path, notes))
            case "browser_state":
                parts.append(browser_state_text(part, path))
            case _:
                parts += _parts_of(part, path, _RESULTS, notes)
    return _result(block, name, parts)


def _result(block: Mapping[str, Any], name: str, parts: list[Part]) -> Message:
    text, images = _joined(parts)
    if not text and not images and block.get("is_error") is True:
        text = "error"
    called = expect_str(block.get("tool_use_id"), f"{name}.tool_use_id")
    return Message(Role.TOOL, text, tool_call_id=called, images=images)


def _reference(block: Mapping[str, Any], name: str, notes: Notes) -> str:
    tool = expect_str(block.get("tool_name"), f"{name}.tool_name")
    notes.loaded.append((tool, name))
    return f"The tool {tool} is available.\n"


def _parse_assistant(content: Any, name: str, notes: Notes) -> list[Message]:
    """Parse all blocks, in any order, into one message: the answer was stored as one.

    The result of a tool that a provider ran ends the message with its call, and the rest is another one.
    """
    if type(content) is str:
        return [Message(Role.ASSISTANT, content)]
    messages: list[Message] = []
    answer = _Answer()
    for block, path in _blocks(content, name):
        kind = block.get("type")
        if kind == "thinking":
            answer.thoughts.append(optional_str(block, "thinking", f"{path}.") or "")
            answer.origin = origin_of(block.get("signature")) or answer.origin
        elif kind == "text":
            answer.texts.append(expect_str(block.get("text"), f"{path}.text"))
        elif not isinstance(kind, str):
            raise _refusal(block, path, _ANSWERS)
        elif kind in _CALLS:
            answer.calls.append(_parse_call(block, path))
        elif kind in _IGNORED:
            notes.dropped.append(path)
        elif kind in _OF_PROVIDERS:
            messages += [*answer.messages(), _provided_result(block, path, notes)]
            answer = _Answer()
        else:
            raise _refusal(block, path, _ANSWERS)
    return [*messages, *answer.messages()] if messages else [answer.message()]


_ANSWERS = tuple(
    kind for kind in BLOCKS if kind in {"text", "thinking"} | _CALLS or kind in _OF_PROVIDERS or kind in _IGNORED
)


class _Answer:
    """The blocks of one assistant message, or of the part of it before the result of a tool."""

    __slots__ = ("calls", "origin", "texts", "thoughts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.thoughts: list[str] = []
        self.calls: list[ToolCall] = []
        self.origin: str | None = None

    def message(self) -> Message:
        reasoning = "".join(self.thoughts) or None
        return Message(Role.ASSISTANT, "".join(self.texts), tuple(self.calls), reasoning=reasoning, origin=self.origin)

    def messages(self) -> list[Message]:
        """The message, if it has content."""
        return [self.message()] if self.texts or self.thoughts or self.calls else []


def _provided_result(block: Mapping[str, Any], name: str, notes: Notes) -> Message:
    found, at = block.get("content"), f"{name}.content"
    if isinstance(found, dict) and "tool_references" in found:
        references = _blocks(found["tool_references"], f"{at}.tool_references")
        return _result(block, name, [_reference(reference, path, notes) for reference, path in references])
    return _result(block, name, result_parts(block, name))


def _parse_call(block: Mapping[str, Any], name: str) -> ToolCall:
    tool_input, called = block.get("input"), called_function(block, name)
    if block.get("type") == "mcp_tool_use":
        called = f"{expect_str(block.get('server_name'), f'{name}.server_name')}_{called}"
    return ToolCall(
        id=expect_str(block.get("id"), f"{name}.id"),
        name=called,
        arguments=arguments_of(
            {} if tool_input is None else expect_object(tool_input, f"{name}.input"), f"{name}.input"
        ),
    )
