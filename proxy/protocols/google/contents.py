"""Parses the contents of a conversation into `Message`s. Adjacent contents of the model are one answer.

Ids of calls are optional in this API: a result without one answers the first open call of its function.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.parsed_items import ParsedBodies, read_items
from proxy.protocols.fields import expect_list, expect_object, expect_str, optional_bool, optional_str
from proxy.protocols.google.names import MOST_SHOWN, given, in_camel
from proxy.protocols.parts import Images, image_of, joined
from proxy.protocols.signatures import origin_of
from proxy.protocols.tool_inputs import arguments_of, json_text
from proxy.types import Api, ImagePart, Message, Role, ToolCall
from tokengrove.errors import InvalidRequest, UnsupportedParameter, brief

PARSED_PARTS = frozenset({"text", "inlineData", "fileData", "functionCall", "functionResponse"})
"""The kinds of parts, of which each part has one."""
REFUSED_PARTS = frozenset({"executableCode", "codeExecutionResult", "toolCall", "toolResponse", "audioTranscription"})
"""The kinds of parts that only Google's servers write."""
MODIFIERS = frozenset({"thought", "thoughtSignature", "mediaResolution"})
"""Fields beside the kind that are read."""
IGNORED_MODIFIERS = frozenset(
    {
        *("videoMetadata", "partMetadata", "mediaProcessing", "speechMetadata", "documentMetadata"),
        *("spreadsheetMetadata", "audioMetadata"),
    }
)
"""Fields beside the kind that describe other media than images."""
_PART = PARSED_PARTS | REFUSED_PARTS | MODIFIERS | IGNORED_MODIFIERS
CALL = frozenset({"id", "name", "args"})
REFUSED_CALL = frozenset({"partialArgs"})
IGNORED_CALL = frozenset({"willContinue"})
_CALL = CALL | REFUSED_CALL | IGNORED_CALL
RESULT = frozenset({"id", "name", "response", "parts"})
IGNORED_RESULT = frozenset({"willContinue", "scheduling"})
_RESULT = RESULT | IGNORED_RESULT
_OUTPUTS = ("output", "result")
_ROLES = frozenset({"role", "parts"})

Part = tuple[Mapping[str, Any], str]
"""A part and its path."""


class Conversation:
    """The messages parsed so far, the calls without a result as pairs of id and name, and the ignored fields."""

    __slots__ = ("_open", "dropped", "messages")

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.dropped: list[str] = []
        self._open: list[tuple[str, str]] = []

    def copy(self) -> Conversation:
        other = Conversation()
        other.messages, other.dropped, other._open = self.messages.copy(), self.dropped.copy(), self._open.copy()
        return other

    def parse(self, values: list[Any], start: int = 0) -> None:
        """Add the contents from index `start` on. Raises InvalidRequest with the path of the field."""
        for index, value in enumerate(values[start:], start):
            name = f"contents[{index}]"
            content = in_camel(expect_object(value, name), _ROLES)
            role, parts = content.get("role"), parts_of(content.get("parts"), f"{name}.parts", self.dropped)
            if role == "model":
                self._add_answer(parts, index)
            elif role in (None, "", "user", "function"):
                self._add_user(parts, name)
            elif role == "system":
                self.messages.append(Message(Role.SYSTEM, text_of(parts)))
            else:
                raise InvalidRequest(f"'{name}.role' must be user or model, not {brief(role)}", param=f"{name}.role")

    def _add_answer(self, parts: list[Part], index: int) -> None:
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[ToolCall] = []
        origin: str | None = None
        for place, (part, path) in enumerate(parts):
            origin = origin_of(part.get("thoughtSignature")) or origin
            if part.get("functionCall") is not None:
                calls.append(_call(part["functionCall"], f"{path}.functionCall", f"call_{index}_{place}"))
            elif optional_bool(part, "thought", at=f"{path}."):
                thoughts.append(_text(part, path))
            else:
                texts.append(_text(part, path))
        answer = Message(
            Role.ASSISTANT, "".join(texts), tuple(calls), reasoning="".join(thoughts) or None, origin=origin
        )
        last = self.messages[-1] if self.messages else None
        if last is not None and last.role is Role.ASSISTANT:
            self.messages[-1] = answer = _merged(last, answer)
        else:
            self.messages.append(answer)
        self._open = [(call.id, call.name) for call in answer.tool_calls]

    def _add_user(self, parts: list[Part], name: str) -> None:
        """Add the results of calls, then the rest: results must follow their calls."""
        if not parts:
            raise InvalidRequest(f"'{name}.parts' must hold at least one part", param=f"{name}.parts")
        others: list[str | ImagePart] = []
        for part, path in parts:
            if part.get("functionResponse") is not None:
                self.messages.append(self._result(part["functionResponse"], f"{path}.functionResponse"))
            else:
                others.append(_text_or_image(part, path))
        if others:
            text, images = _content(others)
            self.messages.append(Message(Role.USER, text, images=images))

    def _result(self, value: Any, name: str) -> Message:
        result = in_camel(expect_object(value, name), _RESULT)
        self.dropped += (f"{name}.{field}" for field in given(result) if field in IGNORED_RESULT)
        called = expect_str(result.get("name"), f"{name}.name")
        parts: list[str | ImagePart] = [_result_text(result.get("response"), f"{name}.response")]
        for part, path in parts_of(result.get("parts"), f"{name}.parts", self.dropped):
            parts.append(_text_or_image(part, path))
        text, images = _content(parts)
        answered = self._answered(optional_str(result, "id", f"{name}."), called)
        return Message(Role.TOOL, text, tool_call_id=answered, name=called, images=images)

    def _answered(self, call_id: str | None, name: str) -> str | None:
        """The id of the call that a result answers: the open call with its id, else the first one of its function."""
        by_id = [call for call in self._open if call[0] == call_id]
        found = by_id or [call for call in self._open if call[1] == name]
        if not found:
            return call_id
        self._open.remove(found[0])
        return found[0][0]


def parse_contents(values: list[Any], bodies: ParsedBodies | None) -> Conversation:
    """Parse all contents of a body. `bodies`: the parsed items of earlier bodies of the session."""
    return read_items(bodies, Api.GOOGLE, values, Conversation(), Conversation.parse)


def parse_system(value: Any, dropped: list[str]) -> tuple[Message, ...]:
    """Parse `systemInstruction`, a content or a text, into one leading message, or none."""
    at = "systemInstruction"
    if value is None or isinstance(value, str):
        text = value or ""
    else:
        content = in_camel(expect_object(value, at), _ROLES)
        text = text_of(parts_of(content.get("parts"), f"{at}.parts", dropped))
    return (Message(Role.SYSTEM, text),) if text else ()


def parts_of(value: Any, name: str, dropped: list[str]) -> list[Part]:
    """Return the parts at the path `name`, each checked to have one kind, which this server knows."""
    found: list[Part] = []
    items = [value] if isinstance(value, dict) else [] if value is None else expect_list(value, name)
    for index, item in enumerate(items):
        path = f"{name}[{index}]"
        part = in_camel({"text": item} if isinstance(item, str) else expect_object(item, path), _PART)
        fields = given(part)
        if unknown := [field for field in fields if field not in _PART or field in REFUSED_PARTS]:
            message = f"'{path}' has {brief(unknown[0])}, which is not supported: this server has no such part"
            raise UnsupportedParameter(message, param=f"{path}.{unknown[0][:MOST_SHOWN]}")
        kinds = [field for field in fields if field in PARSED_PARTS]
        if len(kinds) > 1:
            message = f"'{path}' has {kinds[0]} and {kinds[1]}; give each a part of its own"
            raise InvalidRequest(message, param=f"{path}.{kinds[1]}")
        if not kinds and "thoughtSignature" not in fields:
            raise InvalidRequest(f"'{path}' needs one of {', '.join(sorted(PARSED_PARTS))}", param=path)
        dropped += (f"{path}.{field}" for field in fields if field in IGNORED_MODIFIERS)
        found.append((part, path))
    return found


def text_of(parts: list[Part]) -> str:
    """The joined text of parts that may be only text."""
    return "".join(_text(part, path) for part, path in parts)


def _text(part: Mapping[str, Any], path: str) -> str:
    """The text of a part; "" for a part that has only a signature."""
    if part.get("text") is not None:
        return expect_str(part["text"], f"{path}.text")
    kinds = [field for field in given(part) if field in PARSED_PARTS]
    if not kinds:
        return ""
    if image_of(part) is not None or kinds[0] == "functionResponse":
        what = "an image" if image_of(part) is not None else "a functionResponse"
        message = f"'{path}' is {what}; only contents from the user may have one"
    elif kinds[0] == "functionCall":
        message = f"'{path}' is a functionCall; only contents from the model may have one"
    else:
        message = f"'{path}' has {kinds[0]}, which is not supported: the model accepts text only"
    raise UnsupportedParameter(message, param=f"{path}.{kinds[0]}")


def _text_or_image(part: Mapping[str, Any], path: str) -> str | ImagePart:
    if (image := image_of(part)) is not None:
        return image
    if optional_bool(part, "thought", at=f"{path}."):
        raise InvalidRequest(f"'{path}' is a thought; only contents from the model may have one", param=path)
    return _text(part, path)


def _content(parts: list[str | ImagePart]) -> tuple[str, Images]:
    try:
        return "".join(parts), ()  # type: ignore[arg-type]
    except TypeError:
        return joined(parts)


def _result_text(value: Any, name: str) -> str:
    """The result of a call as text. An object with `output` or `result` alone stands for its value."""
    if value is None:
        return ""
    response = expect_object(value, name)
    if len(response) == 1 and (key := next(iter(response))) in _OUTPUTS:
        value = response[key]
    return value if isinstance(value, str) else json_text(value, name)


def _call(value: Any, name: str, place: str) -> ToolCall:
    """A call; `place` stands for the id that it may lack."""
    call = in_camel(expect_object(value, name), _CALL)
    for field in given(call):
        if field in REFUSED_CALL:
            message = f"'{name}.{field}' is not supported; send the whole 'args'"
            raise UnsupportedParameter(message, param=f"{name}.{field}")
    args = call.get("args")
    arguments = arguments_of({} if args is None else expect_object(args, f"{name}.args"), f"{name}.args")
    return ToolCall(
        optional_str(call, "id", f"{name}.") or place, expect_str(call.get("name"), f"{name}.name"), arguments
    )


def _merged(first: Message, second: Message) -> Message:
    return first._replace(
        content=first.content + second.content,
        tool_calls=first.tool_calls + second.tool_calls,
        reasoning="".join(filter(None, (first.reasoning, second.reasoning))) or None,
        origin=first.origin or second.origin,
    )
