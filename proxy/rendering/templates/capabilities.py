"""Probes what a chat template can express: renders small conversations and checks what is missing in the text.

No part of a request is dropped silently: the parts that the template cannot express are refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from proxy.rendering.templates.call_ids import CallIds
from proxy.rendering.templates.message_dicts import Arguments, MessageDict, to_dicts, tool_dicts
from proxy.types import ImagePart, Message, Role, Tool, ToolCall
from tokengrove.errors import InvalidRequest

# The keys from which templates read the reasoning of an assistant message.
REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class WriteText(Protocol):
    """Renders one conversation as text. Raises InvalidRequest with the template's own error message."""

    def __call__(
        self, messages: list[MessageDict], tools: list[dict[str, Any]] | None, options: dict[str, Any], *, prompt: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a chat template can express.

    `arguments`: the form that it requires for the arguments of a call; None if it writes no calls. `call_ids`: the
    style of its call ids. `reasoning_key`: the message key from which it reads reasoning; None if it never writes
    reasoning. `keeps_reasoning`: it still writes the reasoning of a call when results and further calls follow.
    `images`: the roles whose messages it writes with images. `late_images`: it writes a later system message with
    images in its place; if the message moved, its images would take the places of others. The other fields: whether it
    writes several calls in one message, tools, tool results, a leading or later system message, and two user messages
    in a row.
    """

    arguments: Arguments | None
    call_ids: CallIds
    parallel_calls: bool
    reasoning_key: str | None
    keeps_reasoning: bool
    tools: bool
    tool_results: bool
    system: bool
    late_system: bool
    two_users: bool
    images: frozenset[Role] = frozenset()
    late_images: bool = False

    def require(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raise InvalidRequest naming the first part that the template would drop or refuse."""
        if tools and not self.tools:
            raise _cannot_express("tools", "tools")
        earlier: Role | None = None
        for message in messages:
            role, calls = message.role, len(message.tool_calls)
            if calls and self.arguments is None:
                raise _cannot_express("assistant tool calls")
            if calls > 1 and not self.parallel_calls:
                raise _cannot_express("several tool calls in one message")
            if role is Role.TOOL and not self.tool_results:
                raise _cannot_express("tool results")
            if role is Role.SYSTEM and earlier is None and not self.system:
                raise _cannot_express("system messages")
            if role is Role.SYSTEM and earlier is not None and not self.late_system:
                raise _cannot_express("a system message after the first message")
            if role is earlier is Role.USER and not self.two_users:
                raise _cannot_express("two user messages in a row")
            if message.images and role not in self.images:
                raise _cannot_express(f"images in {_IMAGES_IN[role]}")
            if message.images and role is Role.SYSTEM and earlier is not None and not self.late_images:
                raise _cannot_express(f"images in later {_IMAGES_IN[role]}")
            earlier = role


def _cannot_express(what: str, param: str = "messages") -> InvalidRequest:
    return InvalidRequest(f"the chat template of this model cannot express {what}", param=param)


_IMAGES_IN = {
    Role.SYSTEM: "system messages; put them into a user message",
    Role.USER: "user messages",
    Role.ASSISTANT: "assistant messages",
    Role.TOOL: "tool results; send them in a user message after the results",
}
_USER = Message(Role.USER, "Probe-user")
_SECOND = Message(Role.USER, "Probe-second")
_ANSWER = Message(Role.ASSISTANT, "Probe-answer")
_SYSTEM = Message(Role.SYSTEM, "Probe-system")
_LATE = Message(Role.SYSTEM, "Probe-late")
_CALL = ToolCall("call_0", "probe_tool", '{"probe_key": "probe_value"}')
_OTHER = ToolCall("call_1", "probe_other", '{"probe_key": "other_value"}')
_RESULTS = (Message(Role.TOOL, "Probe-result", (), "call_0"), Message(Role.TOOL, "Probe-other", (), "call_1"))
_RESULT_TEXTS = tuple(message.content for message in _RESULTS)
_TOOL = Tool("probe_tool", "Probe-description", {"type": "object", "properties": {"probe_key": {"type": "string"}}})


def probe_capabilities(write: WriteText, placeholder: str = "") -> Capabilities:
    """Probe a template by rendering about twenty short conversations.

    `placeholder`: the text that it writes for an image; "" for a model without vision.
    """
    arguments, ids = next(_call_forms(write), (None, CallIds.GIVEN))
    probes = _Probes(write, arguments or Arguments.OBJECT, ids)
    one, two = Message(Role.ASSISTANT, "", (_CALL,)), Message(Role.ASSISTANT, "", (_CALL, _OTHER))
    reasoning_key = next((key for key in REASONING_KEYS if probes.shows_reasoning(key)), None)
    return Capabilities(
        arguments=arguments,
        call_ids=ids,
        parallel_calls=probes.shows((_USER, two, *_RESULTS), "probe_value", "other_value", *_RESULT_TEXTS),
        reasoning_key=reasoning_key,
        keeps_reasoning=reasoning_key is not None and probes.keeps_reasoning(reasoning_key),
        tools=probes.shows((_USER,), "Probe-user", "probe_tool", tools=(_TOOL,)),
        tool_results=probes.shows((_USER, one, _RESULTS[0]), "Probe-result"),
        system=probes.shows((_SYSTEM, _USER), "Probe-system", "Probe-user"),
        late_system=probes.shows((_USER, _ANSWER, _LATE, _SECOND), "Probe-late", "Probe-second"),
        two_users=probes.shows((_USER, _SECOND), "Probe-user", "Probe-second"),
        images=frozenset(filter(partial(probes.shows_image, placeholder), Role)) if placeholder else frozenset(),
        late_images=bool(placeholder) and probes.keeps_order(_USER, _ANSWER, _LATE, _SECOND),
    )


@dataclass(frozen=True, slots=True)
class _Probes:
    """Renders probes with one template, with arguments and call ids in one form."""

    write: WriteText
    arguments: Arguments
    ids: CallIds

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Return the rendered text, empty if the template refuses."""
        return self._written(to_dicts(messages, self.arguments, self.ids), tools)

    def shows(self, messages: Sequence[Message], *needles: str, tools: Sequence[Tool] = ()) -> bool:
        """Return whether the rendering contains all `needles`."""
        text = self.text(messages, tools)
        return all(needle in text for needle in needles)

    def keeps_order(self, *messages: Message) -> bool:
        """Return whether the texts of all messages appear in the rendering in their order."""
        text = self.text(messages)
        places = [text.find(message.content) for message in messages]
        return -1 not in places and places == sorted(places)

    def shows_image(self, placeholder: str, role: Role) -> bool:
        """Return whether the template writes each image of such a message once, and the text next to it."""
        image = ImagePart("", len("Probe-seen"))
        seen = Message(
            role, "Probe-seenProbe-after", (), "call_0" if role is Role.TOOL else None, images=(image, image)
        )
        calls = Message(Role.ASSISTANT, "", (_CALL,))
        before = {Role.SYSTEM: (), Role.USER: (), Role.ASSISTANT: (_USER,), Role.TOOL: (_USER, calls)}[role]
        text = self.text((*before, seen) if role is not Role.SYSTEM else (seen, _USER))
        return text.count(placeholder) == 2 and "Probe-seen" in text and "Probe-after" in text

    def shows_reasoning(self, key: str) -> bool:
        """Return whether the template writes reasoning from `key`, with an answer or at least with a call."""
        for answer in (_ANSWER, Message(Role.ASSISTANT, "", (_CALL,))):
            dicts = to_dicts((_USER, answer), self.arguments, self.ids)
            dicts[-1][key] = "Probe-thought"
            if "Probe-thought" in self._written(dicts, ()):
                return True
        return False

    def keeps_reasoning(self, key: str) -> bool:
        """Return whether the reasoning of a call stays when its result, another call and its result follow."""
        first, then = Message(Role.ASSISTANT, "", (_CALL,)), Message(Role.ASSISTANT, "", (_OTHER,))
        dicts = to_dicts((_USER, first, _RESULTS[0], then, _RESULTS[1]), self.arguments, self.ids)
        dicts[1][key], dicts[3][key] = "Probe-thought", "Probe-afterthought"
        text = self._written(dicts, ())
        return "Probe-thought" in text and "Probe-afterthought" in text

    def _written(self, dicts: list[MessageDict], tools: Sequence[Tool]) -> str:
        try:
            return self.write(dicts, tool_dicts(tools), {}, prompt=False)
        except InvalidRequest:
            return ""


def _call_forms(write: WriteText) -> Iterator[tuple[Arguments, CallIds]]:
    """Yield the forms that write a call intact: neither as Python's `str` prints it nor encoded twice.

    A template that writes only the id of a call (Kimi) shows its name if the id contains it. A template without tool
    results may still write calls, so the probe with a result decides only the style of the ids.
    """
    called = (_USER, Message(Role.ASSISTANT, "", (_CALL,)))
    for ids, arguments in itertools.product((CallIds.GIVEN, CallIds.NUMBERED, CallIds.NINE), Arguments):
        text = _Probes(write, arguments, ids).text(called)
        whole = all(needle in text for needle in ("probe_tool", "probe_key", "probe_value"))
        if not whole or "{'probe_key'" in text or '\\"probe_key' in text:
            continue
        given, nine = (_Probes(write, arguments, style) for style in (ids, CallIds.NINE))
        answered = (*called, _RESULTS[0])
        if not given.shows(answered, "Probe-result") and nine.shows(answered, "Probe-result"):
            yield arguments, CallIds.NINE
        yield arguments, ids
