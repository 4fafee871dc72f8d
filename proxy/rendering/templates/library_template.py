"""Adapts a renderer of the `renderers` package (a library renderer) to `Template`. It uses our tokenizer.

It renders for folders that have no chat template. The package is optional: pip install 'tokengrove[renderers]'.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.rendering.templates.chat_template import Options, require_text
from proxy.rendering.templates.message_dicts import to_dicts, tool_dicts
from proxy.rendering.tokenizer import Tokenizer
from proxy.types import Ids, Message, Tool, ids_of
from tokengrove.errors import ConfigurationError, InvalidRequest

# Library renderers raise these for conversations that they cannot write.
_RENDER_ERRORS = (ValueError, TypeError, KeyError, NotImplementedError)

# The maximum number of cached renderers, one per set of template options: clients choose the options.
_READY = 32


class LibraryTemplate:
    """A library renderer. `retention` "all" keeps earlier reasoning when bridging."""

    # The package does not say whether a rendering depends on the time.
    timeless = False

    def __init__(self, name: str, tokenizer: Tokenizer, retention: str = "all") -> None:
        self.name = name
        self._tokenizer = _LibraryTokenizer(tokenizer)
        self._retention = retention
        self._ready: dict[str, Any] = {}
        self.engine = f"renderer {name}"
        try:
            self.stop_token_ids = tuple(self._renderer({}).get_stop_token_ids())
        except (AssertionError, ImportError, *_RENDER_ERRORS) as error:
            raise ConfigurationError(f"the tokenizer does not fit family {name}: {error}") from error

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Options, *, prompt: bool = True
    ) -> Ids:
        renderer = self._renderer(options)
        require_text(messages)
        try:
            ids = renderer.render_ids(to_dicts(messages), tools=tool_dicts(tools), add_generation_prompt=prompt)
        except _RENDER_ERRORS as error:
            raise InvalidRequest(f"this model cannot express this conversation: {error}", param="messages") from error
        return ids_of(ids)

    def extend(self, tail: Ids, output: Ids, messages: Sequence[Message], options: Options) -> Ids | None:
        """Return the ids to append to `tail + output` (the end of what the model saw), or None if unknown."""
        known = (tail + output).tolist()
        try:
            bridged = self._renderer(options).bridge_to_next_turn(tail.tolist(), output.tolist(), to_dicts(messages))
        except _RENDER_ERRORS:
            return None
        if bridged is None or bridged.token_ids[: len(known)] != known:
            return None
        return ids_of(bridged.token_ids[len(known) :])

    def _renderer(self, options: Options) -> Any:
        key = json.dumps(options, sort_keys=True, default=str)
        if key not in self._ready:
            if len(self._ready) >= _READY:
                self._ready.clear()
            self._ready[key] = self._build(options)
        return self._ready[key]

    def _build(self, options: Options) -> Any:
        """Build a renderer. Options unknown to the family are ignored, as a chat template ignores them."""
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
    """The tokenizer interface that the library uses. Without `__call__`, the library does not compute offsets."""

    # The library treats a token equal to this one as missing, and Qwen's tokenizers set it to their end-of-text token.
    unk_token_id: int | None = None
    name_or_path = ""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.special_token_id("eos_token")
        self.bos_token_id = tokenizer.special_token_id("bos_token")

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text).tolist()

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> str:
        return self._tokenizer.decode([token_ids] if isinstance(token_ids, int) else token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            return self._tokenizer.token_id(tokens)
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def get_vocab(self) -> dict[str, int]:
        spelled = ((self._tokenizer.token(number), number) for number in range(self._tokenizer.vocab_size))
        return {text: number for text, number in spelled if text is not None}
