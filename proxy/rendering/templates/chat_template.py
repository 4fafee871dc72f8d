"""Renders conversations with the model's own chat template. What the template cannot express is refused by name.

A `Template` is either a Hugging Face chat template in Jinja (here) or a renderer of the `renderers` package
(library_template). Both take our messages and raise InvalidRequest for what they cannot write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from jinja2 import Template as JinjaTemplate
from jinja2.exceptions import TemplateError

from proxy.errors import InvalidRequest
from proxy.rendering.templates.capabilities import Capabilities, probe_capabilities
from proxy.rendering.templates.jinja2_template import compile_jinja2
from proxy.rendering.templates.message_dicts import Arguments, MessageDict, to_dicts, tool_dicts
from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Message, Role, Tool

Options = Mapping[str, Any]

# Variables that the server sets, and parameters of transformers' `apply_chat_template`, which are no template options.
_RESERVED = frozenset(
    (
        *("messages", "conversation", "tools", "chat_template", "add_generation_prompt", "continue_final_message"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
        *("return_assistant_tokens_mask", "sanitize_control_tokens", "kwargs"),
    )
)


class Template(Protocol):
    """Renders whole conversations; `extend` may render only what follows an answer."""

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> list[int]:
        """Return the ids of the conversation, with the generation prompt if `prompt`. Raises InvalidRequest."""

    def extend(
        self, tail: list[int], output: list[int], messages: Sequence[Message], options: Options
    ) -> list[int] | None:
        """Return the ids to append to `tail + output` (the end of what the model saw), or None if unknown."""


def require_text(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest if there are no messages, or if one has an image."""
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message", param="messages")
    if any(message.images for message in messages):
        raise InvalidRequest("this model accepts text only, no images", param="messages")


class ChatTemplate:
    """A Hugging Face chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled = {name: compile_jinja2(source) for name, source in tokenizer.chat_templates.items()}

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the template can express; probed once, on first use."""
        return probe_capabilities(self.write)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> list[int]:
        require_text(messages)
        self.capabilities.require(messages, tools)
        return self._tokenizer.encode(self._text(messages, tools, options, prompt=prompt))

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool) -> str:
        """Render as text. If the template refuses, retry without reasoning: gpt-oss cannot write it beside content."""
        given = tool_dicts(tools)
        try:
            return self.write(self._dicts(messages), given, options, prompt=prompt)
        except InvalidRequest:
            silent = [message._replace(reasoning=None) for message in messages]
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
        """The Jinja source; several named templates are joined."""
        return "\n".join(self._tokenizer.chat_templates.values())

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the conversation as text. Raises InvalidRequest."""
        return self._text(messages, (), {}, prompt=prompt)

    def end_of_turn(self, known: Sequence[int]) -> list[int]:
        """Return the marker that the template writes right after an answer, unless it ends turns with one of `known`.

        The list has at most one id.
        """
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
        """Return the text of the conversation. Raises InvalidRequest with the template's own error message."""
        if reserved := _RESERVED.intersection(options):
            message = f"'{sorted(reserved)[0]}' in 'chat_template_kwargs' is not a template option; leave it out"
            raise InvalidRequest(message, param="chat_template_kwargs")
        if not isinstance(options.get("enable_thinking", True), bool):
            message = "'enable_thinking' in 'chat_template_kwargs' must be true or false"
            raise InvalidRequest(message, param="chat_template_kwargs")
        variables = {
            "documents": None,
            **self._tokenizer.special_tokens,
            **options,
            "messages": [_shown(message) for message in messages],
            "tools": tools,
            "add_generation_prompt": prompt,
        }
        try:
            return self._chosen(tools).render(variables)
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(
                f"the chat template of this model cannot express this conversation: {error}", param="messages"
            ) from error

    def _chosen(self, tools: list[dict[str, Any]] | None) -> JinjaTemplate:
        """Return the template for this request: some folders have one of their own for tools."""
        if tools is not None and "tool_use" in self._compiled:
            return self._compiled["tool_use"]
        if "default" not in self._compiled:
            raise ValueError(f"it has none named 'default', only {', '.join(sorted(self._compiled))}")
        return self._compiled["default"]


def _shown(message: MessageDict) -> MessageDict:
    """Return a message as transformers shows it to a template: without None, its reasoning under both usual keys."""
    shown = {key: value for key, value in message.items() if value is not None}
    reasoning = next((shown[key] for key in ("reasoning_content", "thinking", "reasoning") if key in shown), None)
    return shown if reasoning is None else {"thinking": reasoning, **shown, "reasoning_content": reasoning}
