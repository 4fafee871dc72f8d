"""Renders conversations with the model's own chat template. Parts that it cannot express are refused by name.

A `Template` is either a Hugging Face chat template in Jinja (here) or a renderer of the `renderers` package
(library_template). Both take this package's messages and raise InvalidRequest for what they cannot write.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

from proxy.rendering.image_tokens import ImageTokens, images_of
from proxy.rendering.templates.capabilities import REASONING_KEYS, Capabilities, probe_capabilities
from proxy.rendering.templates.message_dicts import Arguments, MessageDict, to_dicts, tool_dicts
from proxy.rendering.templates.template_text import REFUSALS, compiled
from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Ids, ImagePart, Message, Role, Tool
from tokengrove.errors import ConfigurationError, InvalidRequest, brief

Options = Mapping[str, Any]

# The maximum number of entries kept by template options, which clients choose.
_KEPT = 64

# Variables that the server sets, and parameters of transformers' `apply_chat_template`. They are not template options.
RESERVED_OPTIONS = frozenset(
    (
        *("messages", "conversation", "conversations", "tools", "chat_template", "add_generation_prompt"),
        *("continue_final_message", "return_assistant_tokens_mask", "sanitize_control_tokens", "kwargs"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"),
    )
)


class Template(Protocol):
    """Renders whole conversations. `engine`: what writes the text. `timeless`: the ids do not depend on the time."""

    @property
    def engine(self) -> str: ...
    @property
    def timeless(self) -> bool: ...

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> Ids:
        """Return the ids of the conversation, with the generation prompt if `prompt`. Raises InvalidRequest."""


def require_text(messages: Sequence[Message]) -> None:
    """Raise InvalidRequest if there are no messages, or if one has an image."""
    if not messages:
        _require_messages(messages)
    for message in messages:
        if message.images:
            raise no_images("")


def _require_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message", param="messages")


def require_no_images(messages: Sequence[Message], blind: str = "") -> None:
    """Raise InvalidRequest if a message has an image. `blind`: why a vision model accepts none; "" for other models."""
    for message in messages:
        if message.images:
            raise no_images(blind)


def no_images(blind: str) -> InvalidRequest:
    """Return the refusal of images. The text of `blind` stays in the log: it may name files of this machine."""
    text = (
        "images are refused: this server lacks what reading images needs; its log says what, as a warning at the start"
    )
    return InvalidRequest(text if blind else "this model accepts text only, no images", param="messages")


class ChatTemplate:
    """A Hugging Face chat template: one Jinja source, or several of which one is for conversations with tools.

    `source`: the Jinja source; several are joined. `images`: how images become tokens; None for a model without vision.
    Raises ConfigurationError if a source is missing or not valid.
    """

    def __init__(self, tokenizer: Tokenizer, images: ImageTokens | None = None) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._numbering: dict[str, bool] = {}
        named, special = tokenizer.chat_templates, frozenset(tokenizer.special_tokens.items())
        if "default" not in named:
            raise ConfigurationError(f"no chat template is named 'default' among {', '.join(named)}")
        self.source = "\n".join(named.values())
        self._plain = compiled(named["default"], special)
        self._with_tools = compiled(named["tool_use"], special) if "tool_use" in named else self._plain

    @property
    def engine(self) -> str:
        """The engine that writes the text, and why."""
        return self._with_tools.engine

    @cached_property
    def timeless(self) -> bool:
        """False if the text may depend on the time or on random numbers."""
        return not any(name in self.source for name in ("strftime_now", "random", "lipsum"))

    @cached_property
    def capabilities(self) -> Capabilities:
        """What the template can express; probed once, on first use."""
        return probe_capabilities(self.write, "" if self._images is None else self._images.vision.placeholder)

    @cached_property
    def _takes_lists(self) -> bool:
        """Whether it writes a message's text only if it is a list of parts, like templates of some vision models."""
        plain = [{"role": "user", "content": "Probe-user"}]

        def shows(messages: list[MessageDict]) -> bool:
            try:
                return "Probe-user" in self._plain.write(
                    {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": False}
                )
            except REFUSALS:
                return False

        return not shows(plain) and shows(_with_lists(plain))

    def numbers_images(self, options: Options) -> bool:
        """Whether it numbers images across the conversation (Qwen's `add_vision_id`)."""
        key = repr(options)
        if key not in self._numbering:
            if len(self._numbering) >= _KEPT:
                self._numbering.clear()
            first, image = Message(Role.USER, "Probe-user"), (ImagePart("", 0),)
            rest = [Message(Role.ASSISTANT, "Probe-answer"), Message(Role.USER, "Probe-second", images=image)]
            try:
                texts = [
                    self._text([head, *rest], (), options, prompt=False).rpartition("Probe-answer")[2]
                    for head in (first, first._replace(images=image))
                ]
            except InvalidRequest:
                texts = [""]
            self._numbering[key] = len(set(texts)) > 1
        return self._numbering[key]

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> Ids:
        if (images := self._images) is not None:
            return self._seen(images, messages, tools, options, prompt=prompt)
        require_text(messages)
        self.capabilities.require(messages, tools)
        return self._tokenizer.encode(self._text(messages, tools, options, prompt=prompt))

    def _seen(
        self, tokens: ImageTokens, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool
    ) -> Ids:
        """Render for a vision model: only images become image tokens."""
        _require_messages(messages)
        self.capabilities.require(messages, tools)
        guarded, guard = tokens.guarded(messages)
        return tokens.encode(self._text(guarded, tools, options, prompt=prompt), images_of(messages), guard)

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool) -> str:
        """Render as text. If the template refuses, retry without reasoning: gpt-oss cannot write it next to content."""
        given = tool_dicts(tools) if tools else None
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

    def text(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """Return the conversation as text. Raises InvalidRequest."""
        return self._text(messages, (), {}, prompt=prompt)

    def end_of_turn(self, known: Sequence[int]) -> list[int]:
        """Return the marker that the template writes after an answer, unless it ends turns with one of `known`.

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
        if options:
            check_options(options)
        if self._images is not None and self._takes_lists:
            messages = _with_lists(messages)
        given = {"documents": None, **options, "messages": _with_reasoning(messages), "tools": tools}
        try:
            return (self._with_tools if tools else self._plain).write({**given, "add_generation_prompt": prompt})
        except REFUSALS as error:
            asked = f" with the options {brief(dict(options))}" if options else ""
            raise InvalidRequest(
                f"the chat template of this model cannot express this conversation{asked}: {error}", param="messages"
            ) from error


def check_options(options: Options) -> None:
    """Raise InvalidRequest (param chat_template_kwargs) for options that no chat template can receive."""
    if not RESERVED_OPTIONS.isdisjoint(options):
        reserved = min(RESERVED_OPTIONS.intersection(options))
        message = f"'{reserved}' in 'chat_template_kwargs' is not a template option; leave it out"
        raise InvalidRequest(message, param="chat_template_kwargs")
    if not isinstance(options.get("enable_thinking", True), bool):
        message = "'enable_thinking' in 'chat_template_kwargs' must be true or false"
        raise InvalidRequest(message, param="chat_template_kwargs")
    documents = options.get("documents") or []
    if not isinstance(documents, list) or not all(isinstance(document, dict) for document in documents):
        raise InvalidRequest(
            "'documents' in 'chat_template_kwargs' must be a list of objects", param="chat_template_kwargs"
        )


def _with_lists(messages: Sequence[MessageDict]) -> list[MessageDict]:
    """Return the messages with their text as a list of parts."""
    return [
        {**message, "content": [{"type": "text", "text": message["content"]}]}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _with_reasoning(messages: Sequence[MessageDict]) -> list[MessageDict]:
    """Return the messages with their reasoning under every key that templates read, as transformers passes it."""
    shown = []
    for message in messages:
        for key in REASONING_KEYS:
            if key in message:
                message = {"thinking": message[key], **message, "reasoning_content": message[key]}
                break
        shown.append(message)
    return shown
