"""Conversations to ids as the model's own chat template writes them. What it cannot express is refused by name.

A `Template` is either Hugging Face's (any Jinja chat template, here) or a renderer of the `renderers` package
(library.py). Both take our messages, and raise InvalidRequest for what they cannot write.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from proxy.errors import InvalidRequest
from proxy.rendering.templates.capabilities import Capabilities, probe_capabilities
from proxy.rendering.templates.message_dicts import Arguments, MessageDict, to_dicts, tool_dicts
from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Message, Role, Tool

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


def require_text(messages: Sequence[Message]) -> None:
    """Raises InvalidRequest where there is nothing to render, or something other than text."""
    if not messages:
        raise InvalidRequest("messages is empty", param="messages")
    if any(message.images for message in messages):
        raise InvalidRequest("this model takes no images", param="messages")


class ChatTemplate:
    """Any Hugging Face chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._apply = tokenizer.hugging_face.apply_chat_template
        # Not for clients to set: they would replace the template or change what the call returns.
        self._reserved = frozenset(inspect.signature(self._apply).parameters) - {"documents"}

    @cached_property
    def capabilities(self) -> Capabilities:
        """Probed when it is first needed, once."""
        return probe_capabilities(self.write)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> list[int]:
        require_text(messages)
        self.capabilities.require(messages, tools)
        return self._tokenizer.encode(self._text(messages, tools, options, prompt=prompt))

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool) -> str:
        """A template that cannot write reasoning beside something else (gpt-oss) is given none, as clients may do."""
        given = tool_dicts(tools)
        try:
            return self.write(self._dicts(messages), given, options, prompt=prompt)
        except InvalidRequest:
            silent = [replace(message, reasoning=None) for message in messages]
            if silent == list(messages):
                raise
            return self.write(self._dicts(silent), given, options, prompt=prompt)

    def _dicts(self, messages: Sequence[Message]) -> list[MessageDict]:
        known = self.capabilities
        dicts = to_dicts(messages, known.arguments or Arguments.OBJECT, known.call_ids)
        if known.reasoning_key not in (None, "reasoning_content"):
            for message in dicts:
                if "reasoning_content" in message:
                    message[str(known.reasoning_key)] = message["reasoning_content"]
        return dicts

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
        return self._text(messages, (), {}, prompt=prompt)

    def end_of_turn(self, known: Sequence[int]) -> list[int]:
        """The marker that the template writes right after an answer, where it ends no turn with one of `known`."""
        history = [Message(Role.USER, "Probe-user"), Message(Role.ASSISTANT, "Probe-answer")]
        try:
            text = self.text([*history, Message(Role.USER, "Probe-second")])
        except InvalidRequest:
            return []
        earlier = self._tokenizer.encode(text.partition("Probe-answer")[2].partition("Probe-second")[0])
        last = self._tokenizer.encode(self.text(history).rpartition("Probe-answer")[2])[:1]
        if set(known).intersection([*earlier, *last]):
            return []
        return [token for token in last if self._tokenizer.is_marker(token)]

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
