"""The one object that the rest of the server asks for tokens: it renders, bridges, parses and constrains.

All four follow the same family, chosen once at start-up from the model's folder. Nothing here reaches a hub.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.errors import ConfigurationError, InvalidRequest, UnsupportedParameter
from proxy.rendering.bridge import Bridge
from proxy.rendering.families import Choice, choose, read_json
from proxy.rendering.lexer import Lexer, Mark
from proxy.rendering.library import LibraryTemplate
from proxy.rendering.output_parser import OutputParser
from proxy.rendering.template import ChatTemplate
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_formats import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    ReasoningFormat,
    ToolFormat,
    reasoning_format,
    tool_format,
)
from proxy.settings import Settings
from proxy.types import Grammar, GrammarPart, Ids, Message, Role, Tool, ToolCall, ToolChoice, ToolChoiceMode, ids_of

log = logging.getLogger(__name__)


def load_renderer(settings: Settings, folder: Path) -> Renderer:
    """The renderer for the tokenizer in `folder`. Raises ConfigurationError, one line, where it cannot be used."""
    tokenizer = Tokenizer.load(folder)
    choice = choose(tokenizer, folder, settings.family, settings.thinking_retention)
    reasoning = _reasoning(choice, settings.reasoning_parser)
    calls = _tool_format(choice, settings.tool_parser)
    return Renderer(
        tokenizer,
        choice,
        stop_token_ids=_stop_token_ids(tokenizer, choice, folder),
        reasoning=reasoning,
        tool_format=calls,
        retention=settings.thinking_retention,
    )


class Renderer:
    """Messages to ids and back for one model. Safe to use from several threads.

    `encoder` says which encoder runs and why. `vocab_size` is one more than the highest id with a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        choice: Choice,
        *,
        stop_token_ids: tuple[int, ...],
        reasoning: ReasoningFormat | None,
        tool_format: ToolFormat | None,
        retention: str = "all",
    ) -> None:
        self.family = choice.family.name
        self.encoder = tokenizer.encoder
        self.vocab_size = tokenizer.vocab_size
        self.stop_token_ids = stop_token_ids
        self.reasoning = reasoning
        self.tool_format = tool_format
        self._tokenizer = tokenizer
        self._template = choice.template
        self._keeps_reasoning = retention == "all"
        self._bridge = Bridge(tokenizer, choice.template, stop_token_ids, reasoning, tool_format)
        self._warned = False

    def render(self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any]) -> Ids:
        """The whole conversation, ending with the generation prompt. Raises InvalidRequest."""
        return ids_of(self._template.render(messages, tools, options))

    def bridge(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
    ) -> Ids | None:
        """The ids to append after `prompt_ids + output_ids`, all context: what closes a cut turn, the new messages,
        the generation prompt. None where this template cannot be extended here: render in full. Raises InvalidRequest.

        `answer` is the message that `output_ids` were parsed to.
        """
        if any(message.images for message in new_messages):
            raise InvalidRequest("this model takes no images", param="messages")
        if not self._keeps_reasoning and self._template_rewrites(new_messages):
            return None
        found = self._bridge.suffix(prompt_ids, output_ids, answer, new_messages, tools, options)
        if found is None and not self._warned:
            self._warned = True
            log.warning("the chat template is not append-only: such turns are rendered in full and not joined")
        return found

    def parser(
        self,
        tools: Sequence[Tool],
        tool_choice: ToolChoice,
        prompt_ids: Ids,
        stop: Sequence[str] = (),
        call_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex}",
    ) -> OutputParser:
        """A parser of one output. Without tools, or with tool choice `none`, calls stay text."""
        calls = self.tool_format if tools and tool_choice.mode is not ToolChoiceMode.NONE else None
        lexer = Lexer(self._tokenizer, self._spellings(calls), self.stop_token_ids, single=bool(stop))
        opened = self._bridge.reasoning_open(prompt_ids)
        return OutputParser(lexer, calls, reasoning_open=opened, stop=stop, call_id=call_id)

    def tool_grammar(self, tools: Sequence[Tool], tool_choice: ToolChoice, parallel: bool) -> Grammar | None:
        """What a forced call looks like, for modes `required` and `named`; None for the others.

        Raises UnsupportedParameter where this family's calls are not known, InvalidRequest for a name not in `tools`.
        """
        if tool_choice.mode not in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED):
            return None
        if self.tool_format is None:
            raise UnsupportedParameter("calls of this model cannot be forced: format unknown", param="tool_choice")
        named = tool_choice.mode is ToolChoiceMode.NAMED
        chosen = [tool for tool in tools if not named or tool.name == tool_choice.name]
        if not chosen:
            raise InvalidRequest(f"tool_choice needs a tool that is there: {tool_choice.name}", param="tool_choice")
        alternatives = tuple(self._call_parts(self.tool_format, tool) for tool in chosen)
        return Grammar(alternatives, repeat=parallel, separator=self.tool_format.separator)

    def encode(self, text: str) -> Ids:
        return ids_of(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def _call_parts(self, calls: ToolFormat, tool: Tool) -> tuple[GrammarPart, ...]:
        return (self._literal(calls.opener), *calls.body(tool), self._literal(calls.closer))

    def _literal(self, text: str) -> GrammarPart:
        token = self._tokenizer.token_id(text)
        return GrammarPart(text=text) if token is None else GrammarPart(text=text, token_id=token)

    def _spellings(self, calls: ToolFormat | None) -> dict[str, Mark]:
        found: dict[str, Mark] = {}
        if self.reasoning is not None:
            found |= {self.reasoning.opener: Mark.THINK_OPEN, self.reasoning.closer: Mark.THINK_CLOSE}
        if calls is not None:
            found |= {calls.opener: Mark.CALL_OPEN, calls.closer: Mark.CALL_CLOSE}
        return found

    def _template_rewrites(self, new_messages: Sequence[Message]) -> bool:
        """Whether the template may take back reasoning: the library's families do at a new user message."""
        known = isinstance(self._template, LibraryTemplate)
        return not known or any(message.role is not Role.TOOL for message in new_messages) or not new_messages


def _reasoning(choice: Choice, named: str | None) -> ReasoningFormat | None:
    name = named or choice.family.reasoning
    if name is not None:
        return reasoning_format(name)
    return next((found for found in REASONING_FORMATS.values() if found.closer in _source(choice.chat)), None)


def _tool_format(choice: Choice, named: str | None) -> ToolFormat | None:
    name = named or choice.family.tool_format
    if name is not None:
        return tool_format(name)
    if choice.chat is None:
        return None
    return next((found for found in TOOL_FORMATS.values() if _writes(choice.chat, found)), None)


def _source(chat: ChatTemplate | None) -> str:
    return "" if chat is None else chat.source


def _writes(chat: ChatTemplate, calls: ToolFormat) -> bool:
    """Whether a call that the template wrote is read back as that call."""
    if chat.expressible.arguments is None:
        return False
    history = [Message(Role.USER, "x"), Message(Role.ASSISTANT, "", (ToolCall("call_0", "probe", '{"key": "value"}'),))]
    text = chat.text(history)
    inner = text.rpartition(calls.opener)[2].partition(calls.closer)[0]
    return calls.opener in text and calls.read(inner) == ("probe", '{"key": "value"}')


def _stop_token_ids(tokenizer: Tokenizer, choice: Choice, folder: Path) -> tuple[int, ...]:
    """The library's, else what the folder's configuration says; and the template's own end of a turn where the
    template never writes one of those (fine-tunes that kept the end token of their base model)."""
    if isinstance(choice.template, LibraryTemplate):
        return tuple(dict.fromkeys(choice.template.stop_token_ids))
    ids = _configured_ends(tokenizer, folder)
    if choice.chat is not None:
        source = choice.chat.source
        written = [token for token in ids if tokenizer.piece(token).decode("utf-8", "replace") in source]
        if not written and "eos_token" not in source:
            ids += choice.chat.end_of_turn()
    if not ids:
        raise ConfigurationError(f"no end token in {folder}: neither a configuration nor the chat template names one")
    return tuple(dict.fromkeys(ids))


def _configured_ends(tokenizer: Tokenizer, folder: Path) -> list[int]:
    ids = [tokenizer.hugging_face.eos_token_id]
    for name in ("generation_config.json", "config.json"):
        value = read_json(folder / name).get("eos_token_id")
        ids += value if isinstance(value, list) else [value]
    return [token for token in ids if isinstance(token, int)]
