"""Parses the input items of a response into messages. The items of one earlier answer become one assistant message.

An answer is sent as several items: reasoning, message, function calls. Clients replay them with or without ids, in
part, and with tool results between the calls. Items with the same origin (interaction id) are joined if only tool
results are between them. Adjacent items without an origin are joined if they can form one answer: reasoning, then at
most one text, and calls. An `item_reference` refers to the stored answer: it becomes an assistant message with the name
ITEM_REFERENCE, an origin, and the text and calls next to it that were sent in full. Calls and results of tools of any
type become calls of functions and their results (`client_tools`, `hosted_calls`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from proxy.parsed_items import ParsedBodies, read_items
from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_str
from proxy.protocols.hosted_tools import HostedTool
from proxy.protocols.openai_types import PARTS, Treatment, item_treatment, part_error
from proxy.protocols.parts import Images, image_of, joined
from proxy.protocols.responses.client_tools import (
    CLIENT_CALLS,
    loaded_text,
    parse_client_call,
    patch_text,
    shell_text,
)
from proxy.protocols.responses.hosted_calls import hosted_call, is_hosted_search
from proxy.protocols.responses.item_ids import MESSAGE_PREFIX, origin_of, read_encrypted
from proxy.protocols.tool_results import link_tool_results
from proxy.types import ITEM_REFERENCE, Api, ImagePart, Message, Role, ToolCall
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

_ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
}
_TEXT_PARTS = frozenset({"input_text", "output_text", "text", "reasoning_text", "summary_text"})
_RESULTS = frozenset(
    {
        *("shell_call_output", "local_shell_call_output", "apply_patch_call_output", "computer_call_output"),
        "tool_search_output",
    }
)
# OpenAI's ciphertexts are Fernet tokens. An agent's message that this server's model wrote is plain text in its place.
_CIPHERTEXT = re.compile(r"gAAAA[A-Za-z0-9_=-]{40,}")

Tools = tuple[list[Any], str]
"""Definitions of tools in an item, and their path."""


class ParsedInput(NamedTuple):
    """The messages of an input, and the notes of dropped items.

    `tools`: further tools of the request (additional_tools). `loaded`: tools that a search found; their definitions are
    in its result.
    """

    messages: Sequence[Message]
    dropped: Sequence[str] = ()
    tools: Sequence[Tools] = ()
    loaded: Sequence[Tools] = ()


def parse_input(value: Any, bodies: ParsedBodies | None = None) -> ParsedInput:
    """Parse `input` (a string or a list of items).

    `bodies`: the parsed items of earlier bodies of the session. Raises InvalidRequest with the item's path.
    """
    if isinstance(value, str):
        return ParsedInput([Message(Role.USER, value)])
    items = expect_list(value, "input")
    conversation = read_items(bodies, Api.RESPONSES, items, _Conversation(), _Conversation.parse)
    return ParsedInput(conversation.messages(), conversation.dropped, conversation.tools, conversation.loaded)


@dataclass(slots=True)
class _Answer:
    """An assistant message under construction. An empty string in `texts` still counts as a text.

    `referenced`: whether items of it were referenced. `text_referenced`: whether its text was.
    """

    origin: str | None
    texts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    referenced: bool = False
    text_referenced: bool = False

    def takes(self, piece: _Answer, *, adjacent: bool) -> bool:
        """Return whether `piece`, a later item, belongs to this answer. `adjacent`: it follows directly."""
        if self.origin is not None and piece.origin is not None:
            return self.origin == piece.origin
        if not adjacent or piece.referenced:
            return False
        if piece.calls:
            return True
        if self.texts or self.text_referenced:
            return False
        return bool(piece.texts) or not (self.referenced or self.calls)

    def add(self, piece: _Answer) -> None:
        self.origin = self.origin or piece.origin
        self.texts += piece.texts
        self.calls += piece.calls
        self.reasoning += piece.reasoning
        self.referenced |= piece.referenced
        self.text_referenced |= piece.text_referenced

    def copy(self) -> _Answer:
        return replace(self, texts=[*self.texts], calls=[*self.calls], reasoning=[*self.reasoning])

    def message(self) -> Message:
        return Message(
            Role.ASSISTANT,
            "".join(self.texts),
            tool_calls=tuple(self.calls),
            name=ITEM_REFERENCE if self.referenced else None,
            reasoning="".join(self.reasoning) or None,
            origin=self.origin,
        )


class _Conversation:
    """Messages under construction. The latest answer takes pieces until a message other than a tool result follows.

    `dropped`, `tools`, `loaded`: as in `ParsedInput`. `_at`: the index of the latest answer while it takes pieces; the
    answer is not among the messages yet.
    """

    def __init__(self) -> None:
        self.dropped: list[str] = []
        self.tools: list[Tools] = []
        self.loaded: list[Tools] = []
        self._messages: list[Message] = []
        self._latest: _Answer | None = None
        self._at = 0

    def copy(self) -> _Conversation:
        other = _Conversation()
        other.dropped, other._messages, other._at = self.dropped.copy(), self._messages.copy(), self._at
        other.tools, other.loaded = self.tools.copy(), self.loaded.copy()
        other._latest = None if self._latest is None else self._latest.copy()
        return other

    def parse(self, items: list[Any], start: int = 0) -> None:
        """Add the items from index `start` on. Raises InvalidRequest with the item's path."""
        for index, item in enumerate(items[start:], start):
            name = f"input[{index}]"
            _add_item(self, _item_type(expect_object(item, name), name), item, name)

    def add(self, message: Message) -> None:
        if message.role is not Role.TOOL:
            self._close()
        self._messages.append(message)

    def add_piece(self, piece: _Answer) -> None:
        latest = self._latest
        if latest is not None and latest.takes(piece, adjacent=self._at == len(self._messages)):
            latest.add(piece)
        else:
            self._close()
            self._latest, self._at = piece, len(self._messages)

    def messages(self) -> list[Message]:
        latest = [] if self._latest is None else [self._latest.message()]
        return link_tool_results([*self._messages[: self._at], *latest, *self._messages[self._at :]])

    def _close(self) -> None:
        """Add the latest answer to the messages: it takes no more pieces."""
        if self._latest is not None:
            self._messages.insert(self._at, self._latest.message())
            self._latest = None


def _item_type(item: Mapping[str, Any], name: str) -> str:
    kind = optional_str(item, "type", f"{name}.")
    if kind is None:  # some clients omit the type of messages and of references
        kind = ITEM_REFERENCE if "role" not in item and "id" in item else "message"
    return kind


def _add_item(conversation: _Conversation, kind: str, item: Mapping[str, Any], name: str) -> None:
    match kind:
        case "message":
            _add_message(conversation, item, name)
        case "reasoning":
            conversation.add_piece(_parse_reasoning(item, name))
        case "function_call":
            conversation.add_piece(_Answer(_origin(item, name), calls=[_parse_call(item, name)]))
        case "function_call_output" | "custom_tool_call_output":
            conversation.add(_parse_output(item, name))
        case "item_reference":
            conversation.add_piece(_parse_reference(item, name))
        case "additional_tools":
            conversation.tools.append((expect_list(item.get("tools"), f"{name}.tools"), f"{name}.tools"))
        case "agent_message":
            conversation.add(_parse_agent_message(item, name))
        case _ if item_treatment(kind, name) is Treatment.HOSTED or is_hosted_search(item):
            conversation.dropped.append(HostedTool.at(name, kind))
        case _ if kind in CLIENT_CALLS:
            conversation.add_piece(_Answer(_origin(item, name), calls=[parse_client_call(item, kind, name)]))
        case _ if kind in _RESULTS:
            conversation.add(_parse_result(item, kind, name))
            if kind == "tool_search_output":
                conversation.loaded.append((item["tools"], f"{name}.tools"))
        case _:
            call, result = hosted_call(item, kind, name)
            if call is not None:
                conversation.add_piece(_Answer(None, calls=[call]))
            if result is not None:
                conversation.add(result)


def _add_message(conversation: _Conversation, item: Mapping[str, Any], name: str) -> None:
    role_name = item.get("role")
    role = _ROLES.get(role_name) if isinstance(role_name, str) else None
    if role is None:
        raise InvalidRequest(f"'{name}.role' must be one of {', '.join(_ROLES)}", param=f"{name}.role")
    if role is Role.ASSISTANT:
        text = _parse_text(item.get("content"), f"{name}.content")
        conversation.add_piece(_Answer(_origin(item, name), texts=[text]))
    else:
        text, images = _parse_content(item.get("content"), f"{name}.content")
        conversation.add(Message(role, text, images=images))


def _parse_reasoning(item: Mapping[str, Any], name: str) -> _Answer:
    """Parse a reasoning item. Its text is `content`, else the text in our `encrypted_content`, else `summary`."""
    text = _parse_text(item.get("content"), f"{name}.content")
    origin, hidden = read_encrypted(optional_str(item, "encrypted_content", f"{name}.") or "")
    summary = _parse_text(item.get("summary"), f"{name}.summary")
    return _Answer(_origin(item, name) or origin, reasoning=[text or hidden or summary])


def _parse_call(item: Mapping[str, Any], name: str) -> ToolCall:
    at = f"{name}."
    return ToolCall(
        id=optional_str(item, "call_id", at) or optional_str(item, "id", at) or "",
        name=expect_str(item.get("name"), f"{name}.name"),
        arguments=optional_str(item, "arguments", at) or "",
    )


def _parse_output(item: Mapping[str, Any], name: str) -> Message:
    text, images = _parse_content(item.get("output"), f"{name}.output")
    return Message(Role.TOOL, text, tool_call_id=optional_str(item, "call_id", f"{name}."), images=images)


def _parse_result(item: Mapping[str, Any], kind: str, name: str) -> Message:
    """Parse the result of a tool that OpenAI defines and a client runs."""
    called, text, images = optional_str(item, "call_id", f"{name}."), "", Images()
    match kind:
        case "shell_call_output":
            text = shell_text(item, name)
        case "apply_patch_call_output":
            text = patch_text(item, name)
        case "tool_search_output":
            text = loaded_text(item, name)
        case "computer_call_output":
            images = (_screenshot(item, name),)
        case _:  # local_shell_call_output, whose `id` is that of the call
            text, given = expect_str(item.get("output"), f"{name}.output"), optional_str(item, "id", f"{name}.")
            called = called or (None if given is None or origin_of(given) else given)
    return Message(Role.TOOL, text, tool_call_id=called, images=images)


def _screenshot(item: Mapping[str, Any], name: str) -> ImagePart:
    image = image_of(expect_object(item.get("output"), f"{name}.output"))
    if image is None:
        raise UnsupportedParameter(
            f"'{name}.output' is a screenshot; this model accepts text only", param=f"{name}.output"
        )
    return image


def _parse_agent_message(item: Mapping[str, Any], name: str) -> Message:
    """Parse a message of another agent, which the user's side sends.

    Its `encrypted_content` is what the model that wrote the message gave its client: with this server, plain text.
    """
    texts: list[Any] = []
    for index, part in enumerate(expect_list(item.get("content"), f"{name}.content")):
        at = f"{name}.content[{index}]"
        if expect_object(part, at).get("type") != "encrypted_content":
            texts.append(_parse_part(part, at))
            continue
        text = expect_str(part.get("encrypted_content"), f"{at}.encrypted_content")
        if _CIPHERTEXT.fullmatch(text):
            message = f"'{at}' is encrypted, and only OpenAI can read it; send the message as a part of type input_text"
            raise UnsupportedParameter(message, param=at)
        texts.append(text)
    text, images = joined(texts)
    return Message(Role.USER, text, images=images)


def _parse_reference(item: Mapping[str, Any], name: str) -> _Answer:
    origin = _origin(item, name)
    if origin is None:
        message = f"'{name}.id' is {brief(item.get('id'))}, which this server did not give out; send the item itself"
        raise InvalidRequest(message, param=f"{name}.id")
    return _Answer(origin, referenced=True, text_referenced=item["id"].startswith(MESSAGE_PREFIX))


def _origin(item: Mapping[str, Any], name: str) -> str | None:
    """Return the interaction id in the item's id, or None without an id of this server."""
    return origin_of(optional_str(item, "id", f"{name}.") or "")


def _parse_text(value: Any, name: str) -> str:
    """Return a string, or the joined text of a list of parts, or "" for null."""
    if value is None or isinstance(value, str):
        return value or ""
    text, images = _parse_content(value, name)
    if images:
        raise UnsupportedParameter(f"'{name}' has an image; answers and reasoning are texts", param=name)
    return text


def _parse_content(value: Any, name: str) -> tuple[str, Images]:
    """Return the text as `_parse_text` does, and the images in it."""
    if value is None or isinstance(value, str):
        return value or "", ()
    parts = [_parse_part(part, f"{name}[{index}]") for index, part in enumerate(expect_list(value, name))]
    try:
        return "".join(parts), ()  # type: ignore[arg-type]
    except TypeError:
        return joined(parts)


def _parse_part(part: Any, name: str) -> str | ImagePart:
    if isinstance(part, str):
        return part
    kind = expect_object(part, name).get("type", "text")
    if kind == "refusal":
        return expect_str(part.get("refusal"), f"{name}.refusal")
    if isinstance(kind, str) and kind in _TEXT_PARTS:
        return expect_str(part.get("text"), f"{name}.text")
    if (image := image_of(part)) is not None:
        return image
    raise part_error(kind, name, PARTS)
