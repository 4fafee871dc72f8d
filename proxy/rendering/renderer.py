"""The one object that the rest of the server asks for tokens: it renders, bridges, parses and constrains.

All four follow the same family, chosen once at start-up from the model's folder. Nothing here reaches a hub.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.engine.grammar import Grammar, GrammarPart
from proxy.errors import InvalidRequest, UnsupportedParameter
from proxy.rendering.bridge import Bridge
from proxy.rendering.choose_formats import choose_reasoning, choose_tool_format, stop_tokens
from proxy.rendering.choose_template import TemplateChoice, choose_template
from proxy.rendering.parsing.build_parser import build_parser
from proxy.rendering.parsing.output_parser import OutputParser
from proxy.rendering.reasoning_formats import ReasoningFormat
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.tool_format import ToolFormat, split_marks
from proxy.settings import Settings
from proxy.types import Ids, Message, Role, Tool, ToolChoice, ToolChoiceMode, ids_of

log = logging.getLogger(__name__)


def load_renderer(settings: Settings, folder: Path) -> Renderer:
    """The renderer for the tokenizer in `folder`. Raises ConfigurationError, one line, where it cannot be used."""
    tokenizer = Tokenizer.load(folder)
    choice = choose_template(tokenizer, folder, settings.family, settings.thinking_retention)
    return Renderer(
        tokenizer,
        choice,
        stop_token_ids=stop_tokens(tokenizer, choice, folder),
        reasoning=choose_reasoning(choice, settings.reasoning_parser),
        tool_format=choose_tool_format(choice, settings.tool_parser),
        retention=settings.thinking_retention,
    )


class Renderer:
    """Messages to ids and back for one model. Safe to use from several threads.

    `why` says how the family was found, `encoder` which encoder runs and why. `vocab_size` is one more than the
    highest id with a text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        choice: TemplateChoice,
        *,
        stop_token_ids: tuple[int, ...],
        reasoning: ReasoningFormat | None,
        tool_format: ToolFormat | None,
        retention: str = "all",
    ) -> None:
        self.family = choice.family.name
        self.why = choice.why
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

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], *, prompt: bool = True
    ) -> Ids:
        """The whole conversation, ending with the generation prompt if `prompt`. Raises InvalidRequest."""
        return ids_of(self._template.render(messages, tools, options, prompt=prompt))

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
        return build_parser(
            self._tokenizer,
            self.stop_token_ids,
            self.reasoning,
            calls,
            tools=tools,
            reasoning_open=self._bridge.reasoning_open(prompt_ids),
            stop=stop,
            call_id=call_id,
        )

    def tool_grammar(self, tools: Sequence[Tool], tool_choice: ToolChoice, parallel: bool) -> Grammar | None:
        """What a forced call looks like, for modes `required` and `named`; None for the others.

        Raises UnsupportedParameter where this family's calls are not known or not JSON, InvalidRequest for a name that
        is not in `tools`.
        """
        if tool_choice.mode not in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED):
            return None
        if self.tool_format is None:
            raise UnsupportedParameter("calls of this model cannot be forced: format unknown", param="tool_choice")
        named = tool_choice.mode is ToolChoiceMode.NAMED
        chosen = [tool for tool in tools if not named or tool.name == tool_choice.name]
        if not chosen:
            raise InvalidRequest(f"tool_choice needs a tool that is there: {tool_choice.name}", param="tool_choice")
        separator = self.tool_format.separator
        alternatives = tuple(self._call_parts(self.tool_format, tool) for tool in chosen)
        return Grammar(alternatives, repeat=parallel and separator is not None, separator=separator or "")

    def encode(self, text: str) -> Ids:
        return ids_of(self._tokenizer.encode(text))

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids)

    def piece(self, token: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character; empty outside the vocabulary."""
        return self._tokenizer.piece(token)

    def _call_parts(self, calls: ToolFormat, tool: Tool) -> tuple[GrammarPart, ...]:
        """What is forced, with the markers as tokens where the vocabulary has them."""
        marks = [calls.opener, calls.closer, *calls.marks]
        tokens = {mark: token for mark in marks if mark and (token := self._tokenizer.token_id(mark)) is not None}
        return tuple(piece for part in calls.forced(tool) for piece in _pieces(part, tokens))

    def _template_rewrites(self, new_messages: Sequence[Message]) -> bool:
        """Whether the template may take back reasoning: the library's families do at a new user message."""
        known = isinstance(self._template, LibraryTemplate)
        return not known or any(message.role is not Role.TOOL for message in new_messages) or not new_messages


def _pieces(part: GrammarPart, tokens: Mapping[str, int]) -> Iterator[GrammarPart]:
    if part.schema is not None:
        yield part
        return
    for text, is_mark in split_marks(part.text, tuple(tokens)):
        yield GrammarPart(text=text, token_id=tokens[text]) if is_mark else GrammarPart(text=text)
