"""What a chat template can write, found by rendering small conversations: what does not come out was dropped.

Nothing that a client said is dropped in silence: what a template cannot express is refused by name.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.errors import InvalidRequest
from proxy.rendering.templates.call_ids import CallIds
from proxy.rendering.templates.message_dicts import Arguments, MessageDict, to_dicts, tool_dicts
from proxy.types import Message, Role, Tool, ToolCall

# Where templates look for the reasoning of an assistant message.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


class WriteText(Protocol):
    """Writes one conversation as text. Raises InvalidRequest with the template's own words."""

    def __call__(
        self, messages: list[MessageDict], tools: list[dict[str, Any]] | None, options: dict[str, Any], *, prompt: bool
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """`arguments` None: no tool calls at all. `reasoning_key` None: reasoning of an assistant is never written."""

    arguments: Arguments | None
    call_ids: CallIds
    parallel_calls: bool
    reasoning_key: str | None
    tools: bool
    tool_results: bool
    system: bool
    late_system: bool
    two_users: bool

    def require(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raises InvalidRequest naming the first thing that the template would drop or refuse."""
        roles = [message.role for message in messages]
        most_calls = max((len(message.tool_calls) for message in messages), default=0)
        missing = [
            (bool(tools) and not self.tools, "tools", "tools"),
            (most_calls > 0 and self.arguments is None, "assistant tool calls", "messages"),
            (most_calls > 1 and not self.parallel_calls, "several tool calls in one message", "messages"),
            (Role.TOOL in roles and not self.tool_results, "tool results", "messages"),
            (roles[:1] == [Role.SYSTEM] and not self.system, "system messages", "messages"),
            (Role.SYSTEM in roles[1:] and not self.late_system, "a system message after the first message", "messages"),
            (_two_users(roles) and not self.two_users, "two user messages in a row", "messages"),
        ]
        for lacks, what, param in missing:
            if lacks:
                raise InvalidRequest(f"the chat template of this model cannot express {what}", param=param)


def _two_users(roles: Sequence[Role]) -> bool:
    return any(a is b is Role.USER for a, b in itertools.pairwise(roles))


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


def probe_capabilities(write: WriteText) -> Capabilities:
    """Renders some twenty short conversations."""
    arguments, ids = next(_call_forms(write), (None, CallIds.GIVEN))
    probes = _Probes(write, arguments or Arguments.OBJECT, ids)
    one, two = Message(Role.ASSISTANT, "", (_CALL,)), Message(Role.ASSISTANT, "", (_CALL, _OTHER))
    return Capabilities(
        arguments=arguments,
        call_ids=ids,
        parallel_calls=probes.shows((_USER, two, *_RESULTS), "probe_value", "other_value", *_RESULT_TEXTS),
        reasoning_key=next((key for key in _REASONING_KEYS if probes.shows_reasoning(key)), None),
        tools=probes.shows((_USER,), "Probe-user", "probe_tool", tools=(_TOOL,)),
        tool_results=probes.shows((_USER, one, _RESULTS[0]), "Probe-result"),
        system=probes.shows((_SYSTEM, _USER), "Probe-system", "Probe-user"),
        late_system=probes.shows((_USER, _ANSWER, _LATE, _SECOND), "Probe-late", "Probe-second"),
        two_users=probes.shows((_USER, _SECOND), "Probe-user", "Probe-second"),
    )


@dataclass(frozen=True, slots=True)
class _Probes:
    """What comes out of one template, given arguments and ids in one form."""

    write: WriteText
    arguments: Arguments
    ids: CallIds

    def text(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
        """Empty where the template refuses."""
        return self._written(to_dicts(messages, self.arguments, self.ids), tools)

    def shows(self, messages: Sequence[Message], *needles: str, tools: Sequence[Tool] = ()) -> bool:
        text = self.text(messages, tools)
        return all(needle in text for needle in needles)

    def shows_reasoning(self, key: str) -> bool:
        """Beside an answer, or where a template keeps it for calls only, beside a call."""
        for answer in (_ANSWER, Message(Role.ASSISTANT, "", (_CALL,))):
            dicts = to_dicts((_USER, answer), self.arguments, self.ids)
            dicts[-1][key] = "Probe-thought"
            if "Probe-thought" in self._written(dicts, ()):
                return True
        return False

    def _written(self, dicts: list[MessageDict], tools: Sequence[Tool]) -> str:
        try:
            return self.write(dicts, tool_dicts(tools), {}, prompt=False)
        except InvalidRequest:
            return ""


def _call_forms(write: WriteText) -> Iterator[tuple[Arguments, CallIds]]:
    """The forms in which a call and its result come out whole, not as Python would print it or encoded twice.

    A template that writes the id only (Kimi) shows the name where the id holds it. One without tool results may still
    write calls, so the result decides only about the ids.
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
