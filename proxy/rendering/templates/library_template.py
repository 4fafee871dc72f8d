"""Adapts a renderer of the `renderers` package (a library renderer) to `Template`. It uses our tokenizer.

A library renderer is used for a folder only if it writes the same ids as the folder's own chat template for the probe
conversations, or if `--family` asks for it and the folder has no chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.errors import ConfigurationError, InvalidRequest
from proxy.rendering.templates.chat_template import ChatTemplate, Options, require_text
from proxy.rendering.templates.message_dicts import to_dicts, tool_dicts
from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Message, Role, Tool, ToolCall

# Library renderers raise these for conversations that they cannot write.
_RENDER_ERRORS = (ValueError, TypeError, KeyError, NotImplementedError)

# Bound of the cache of renderers, one per set of template options: clients choose the options.
_READY = 32


class LibraryTemplate:
    """A library renderer. `retention` "all" keeps earlier reasoning when bridging.

    `twin`: the folder's chat template, once it is known to write the same ids. It does the full renderings, being three
    times faster.
    """

    def __init__(self, name: str, tokenizer: Tokenizer, retention: str = "all") -> None:
        self.name = name
        self.twin: ChatTemplate | None = None
        self._tokenizer = _LibraryTokenizer(tokenizer)
        self._retention = retention
        self._ready: dict[str, Any] = {}
        try:
            self.stop_token_ids = tuple(self._renderer({}).get_stop_token_ids())
        except (AssertionError, ImportError, *_RENDER_ERRORS) as error:
            raise ConfigurationError(f"the tokenizer does not fit family {name}: {error}") from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> list[int]:
        renderer = self._renderer(options)
        if self.twin is not None:
            return self.twin.render(messages, tools, options, prompt=prompt)
        require_text(messages)
        try:
            ids = renderer.render_ids(to_dicts(messages), tools=tool_dicts(tools), add_generation_prompt=prompt)
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"this model cannot express this conversation: {error}", param="messages") from error
        return list(ids)

    def extend(
        self, tail: list[int], output: list[int], messages: Sequence[Message], options: Options
    ) -> list[int] | None:
        """Return the library's own bridge, which needs only the last turn of the history."""
        try:
            bridged = self._renderer(options).bridge_to_next_turn(tail, output, to_dicts(messages))
        except _RENDER_ERRORS:
            return None
        known = [*tail, *output]
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return list(bridged.token_ids[len(known) :])

    def _renderer(self, options: Options) -> Any:
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._ready:
            if len(self._ready) >= _READY:
                self._ready.clear()
            self._ready[key] = self._build(options)
        return self._ready[key]

    def _build(self, options: Options) -> Any:
        """Build a renderer. Options that the family does not know are ignored, as a chat template ignores them."""
        from renderers import config_from_name, create_renderer

        kind: Any = type(config_from_name(self.name))
        known = {key: value for key, value in options.items() if key in kind.template_field_names()}
        retained: Mapping[str, Any] = {"thinking_retention": "all"} if self._retention == "all" else {}
        try:
            config = kind(**known, **retained)
        except ValueError:
            # An option that contradicts the retention applies to full renderings only.
            try:
                config = kind(**known)
            except ValueError as error:
                message = f"'chat_template_kwargs' does not fit this model: {' '.join(str(error).split())}"
                raise InvalidRequest(message, param="chat_template_kwargs") from error
        return create_renderer(self._tokenizer, config)


class _LibraryTokenizer:
    """The tokenizer interface that the library uses. It has no `__call__`, so the library does not compute offsets."""

    # The library treats a token equal to it as missing, and Qwen's tokenizers set it to their end-of-text token.
    unk_token_id: int | None = None
    name_or_path = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.hugging_face.eos_token_id
        self.bos_token_id = tokenizer.hugging_face.bos_token_id
        self.all_special_tokens = list(tokenizer.hugging_face.all_special_tokens)

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        return dict(self._tokenizer.hugging_face.get_vocab())


def agrees(library: LibraryTemplate, template: ChatTemplate) -> bool:
    """Return whether both write the same ids for every probe conversation that the chat template can express.

    At least three must be expressible.
    """
    compared = 0
    for messages, tools, prompt in probe_conversations():
        try:
            wanted = template.render(messages, tools, {}, prompt=prompt)
        except InvalidRequest:
            continue
        try:
            if library.render(messages, tools, {}, prompt=prompt) != wanted:
                return False
        except InvalidRequest:
            return False
        compared += 1
    return compared > 2


def probe_conversations() -> list[tuple[tuple[Message, ...], tuple[Tool, ...], bool]]:
    """Return conversations with all that agents use, each with its tools and whether a generation prompt follows.

    They cover system messages, tools, calls, results, reasoning, several turns, and text that looks like markers.
    """
    system = Message(Role.SYSTEM, "Be brief.")
    user = Message(Role.USER, "What is in <b>a.txt</b>?\n\n ")
    second = Message(Role.USER, "  And in ünïcode.txt? ")
    answer = Message(Role.ASSISTANT, "Nothing.")
    thought = Message(Role.ASSISTANT, "Let me look.", reasoning="I should read it.")
    one = Message(Role.ASSISTANT, "", (ToolCall("call_0", "read", '{"path": "a.txt", "lines": [1, 2.5, null]}'),))
    two = Message(
        Role.ASSISTANT,
        "Both.",
        (ToolCall("call_1", "read", '{"path": "é"}'), ToolCall("call_2", "list", "{}")),
        reasoning="Two calls.",
    )
    results = (Message(Role.TOOL, "empty", (), "call_1"), Message(Role.TOOL, "[]", (), "call_2"))
    parameters = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    tools = (Tool("read", "Read a file.", parameters), Tool("list", "List files: <all> & 'more'."))
    return [
        ((user,), (), True),
        ((system, user), (), True),
        ((system, user, answer, second), (), True),
        ((user, thought, second), (), True),
        ((user, answer), (), False),
        ((user, thought), (), False),
        ((system, user), tools, True),
        ((user,), tools, True),
        ((user, one, Message(Role.TOOL, "empty", (), "call_0")), tools, True),
        ((system, user, two, *results), tools, True),
        ((system, user, two, *results, answer, second), tools, True),
    ]
