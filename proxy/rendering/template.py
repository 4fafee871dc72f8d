"""Conversations to ids as the model's own chat template writes them. What it cannot express is refused by name.

A `Template` is either Hugging Face's (any Jinja chat template, here) or a renderer of the `renderers` package
(library.py). Both take our messages, and raise InvalidRequest for what they cannot write.
"""

from __future__ import annotations

import inspect
import itertools
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from proxy.errors import InvalidRequest
from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Message, Role, Tool, ToolCall

log = logging.getLogger(__name__)

MessageDict = dict[str, Any]
Options = Mapping[str, Any]


class Template(Protocol):
    """Writes whole conversations; `extend` may know a shorter way to write what follows an answer."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> list[int]:
        """Ids of the conversation, with the generation prompt if `prompt`. Raises InvalidRequest."""

    def extend(
        self, tail: list[int], output: list[int], messages: Sequence[Message], options: Options
    ) -> list[int] | None:
        """Ids after `tail + output` (the end of what the model saw), or None where only rendering can tell."""


class Arguments(StrEnum):
    """How a template wants the arguments of a call."""

    OBJECT = "object"
    STRING = "string"


def to_dicts(messages: Sequence[Message], arguments: Arguments = Arguments.OBJECT) -> list[MessageDict]:
    """Messages in the form that chat templates and `renderers` take; tool results get the name of their call."""
    names: dict[str, str] = {}
    out = []
    for message in messages:
        names.update((call.id, call.name) for call in message.tool_calls)
        out.append(_to_dict(message, names, arguments))
    return out


def _to_dict(message: Message, names: Mapping[str, str], arguments: Arguments) -> MessageDict:
    out: MessageDict = {"role": message.role.value, "content": message.content}
    if message.reasoning is not None:
        out["reasoning_content"] = message.reasoning
    if message.tool_calls:
        out["tool_calls"] = [_call_dict(call, arguments) for call in message.tool_calls]
    if message.role is Role.TOOL:
        out["tool_call_id"] = message.tool_call_id
        out["name"] = message.name or names.get(message.tool_call_id or "")
    return out


def _call_dict(call: ToolCall, arguments: Arguments) -> dict[str, Any]:
    value: Any = call.arguments
    if arguments is Arguments.OBJECT:
        value = _parsed_object(call.arguments)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": value}}


def _parsed_object(text: str) -> Any:
    """The object, or the text itself where it is none (some templates write that as it stands)."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def tool_dicts(tools: Sequence[Tool]) -> list[dict[str, Any]] | None:
    """Tools in OpenAI's form, with the key order of Hugging Face's own schemas; None without tools."""
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


def require_text(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest where there is nothing to render, or something other than text."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if any(message.images for message in messages):
        raise InvalidRequest("this model takes no images", param="messages")


@dataclass(frozen=True, slots=True)
class Expressible:
    """What a template can write, found by probing it once; `arguments` None: no tool calls at all."""

    arguments: Arguments | None
    tools: bool
    tool_results: bool
    system: bool
    late_system: bool
    two_users: bool

    def require(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        """Raises InvalidRequest naming the first thing that the template would drop or refuse."""
        roles = [message.role for message in messages]
        missing = [
            (bool(tools) and not self.tools, "tools", "tools"),
            (any(m.tool_calls for m in messages) and self.arguments is None, "assistant tool calls", "messages"),
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


class ChatTemplate:
    """Any Hugging Face chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._apply = tokenizer.hugging_face.apply_chat_template
        # Not for clients to set: they would replace the template or change what the call returns.
        self._reserved = frozenset(inspect.signature(self._apply).parameters) - {"documents"}
        self.expressible = _probe(self)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> list[int]:
        require_text(messages)
        self.expressible.require(messages, tools)
        dicts = to_dicts(messages, self.expressible.arguments or Arguments.OBJECT)
        return self._tokenizer.encode(self.write(dicts, tool_dicts(tools), options, prompt=prompt))

    def extend(
        self, tail: list[int], output: list[int], messages: Sequence[Message], options: Options
    ) -> list[int] | None:
        return None

    @property
    def source(self) -> str:
        """The Jinja text; several named templates joined."""
        template = self._tokenizer.hugging_face.chat_template
        return template if isinstance(template, str) else "\n".join(template.values())

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The conversation as text. Raises InvalidRequest."""
        dicts = to_dicts(messages, self.expressible.arguments or Arguments.OBJECT)
        return self.write(dicts, None, {}, prompt=prompt)

    def end_of_turn(self) -> list[int]:
        """The marker that the template writes right after an answer, if it writes one."""
        text = self.text([Message(Role.USER, "Probe-user"), Message(Role.ASSISTANT, "Probe-answer")])
        after = self._tokenizer.encode(text.rpartition("Probe-answer")[2])
        return [token for token in after[:1] if self._tokenizer.is_marker(token)]

    def write(
        self, messages: list[MessageDict], tools: list[dict[str, Any]] | None, options: Options, *, prompt: bool
    ) -> str:
        """The text of the conversation. Raises InvalidRequest with the template's own words."""
        from jinja2.exceptions import TemplateError

        if reserved := self._reserved.intersection(options):
            raise InvalidRequest(f"{sorted(reserved)[0]} is not a template option", param="chat_template_kwargs")
        try:
            return str(self._apply(messages, tools=tools, tokenize=False, add_generation_prompt=prompt, **options))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the chat template of this model cannot express this conversation: {error}", param="messages"
            ) from error


def _probe(template: ChatTemplate) -> Expressible:
    """Render small conversations; what does not come out was dropped."""
    user = {"role": "user", "content": "Probe-user"}
    arguments = next((kind for kind in Arguments if _shows_call(template, kind)), None)
    result = {"role": "tool", "content": "Probe-result", "tool_call_id": "call_0", "name": "probe_tool"}
    calls = {"role": "assistant", "content": "", "tool_calls": _probe_calls(arguments or Arguments.OBJECT)}
    tool = Tool("probe_tool", "Probe-description", {"type": "object", "properties": {"probe_key": {"type": "string"}}})
    answer = {"role": "assistant", "content": "Probe-answer"}
    late = {"role": "system", "content": "Probe-late"}
    second = {"role": "user", "content": "Probe-second"}
    return Expressible(
        arguments=arguments,
        tools=_shows(template, [user], "Probe-user", "probe_tool", tools=(tool,)),
        tool_results=_shows(template, [user, calls, result], "Probe-result"),
        system=_shows(template, [{"role": "system", "content": "Probe-system"}, user], "Probe-system", "Probe-user"),
        late_system=_shows(template, [user, answer, late, second], "Probe-late", "Probe-second"),
        two_users=_shows(template, [user, second], "Probe-user", "Probe-second"),
    )


def _probe_calls(arguments: Arguments) -> list[dict[str, Any]]:
    return [_call_dict(ToolCall("call_0", "probe_tool", '{"probe_key": "probe_value"}'), arguments)]


def _shows_call(template: ChatTemplate, arguments: Arguments) -> bool:
    """Whether the call comes out whole, and not as Python would print it."""
    messages: list[MessageDict] = [
        {"role": "user", "content": "Probe-user"},
        {"role": "assistant", "content": "", "tool_calls": _probe_calls(arguments)},
    ]
    found = _shows(template, messages, "probe_tool", "probe_key", "probe_value")
    return found and not _shows(template, messages, "{'probe_key'") and not _shows(template, messages, '\\"probe_key')


def _shows(template: ChatTemplate, messages: list[MessageDict], *needles: str, tools: Sequence[Tool] = ()) -> bool:
    try:
        text = template.write(messages, tool_dicts(tools), {}, prompt=False)
    except InvalidRequest:
        return False
    return all(needle in text for needle in needles)
