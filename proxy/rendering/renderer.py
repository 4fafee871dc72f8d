"""The renderer of one model: it renders conversations, bridges turns, parses outputs and writes tool-call grammars.

All four follow one family, chosen at start-up from the model's folder. Nothing is downloaded.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from proxy.engine.grammar import Grammar, GrammarPart
from proxy.progress import doing
from proxy.rendering.bridge import Bridge
from proxy.rendering.choose_formats import choose_reasoning, choose_tool_format, stop_tokens
from proxy.rendering.choose_template import TemplateChoice, choose_template, require_library
from proxy.rendering.families import family_named
from proxy.rendering.image_tokens import ImageTokens, images_of
from proxy.rendering.json_files import read_json
from proxy.rendering.parsing.output_parser import OutputParser
from proxy.rendering.parsing.parser_factory import ParserFactory
from proxy.rendering.prefill import Prefills
from proxy.rendering.prompt_cache import PromptCache, count_characters, prompt_key
from proxy.rendering.reasoning_formats import ReasoningFormat, reasoning_format
from proxy.rendering.sight import EXAMPLE, Sight
from proxy.rendering.templates.chat_template import no_images, require_no_images
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tokenizer_files import chat_templates, require_vocabulary
from proxy.rendering.tool_calls.known_formats import tool_format
from proxy.rendering.tool_calls.tool_format import ToolFormat, split_marks
from proxy.settings import Settings
from proxy.types import Ids, ImagePart, Message, Parsing, PlacedImage, Role, Tool, ToolChoice, ToolChoiceMode
from proxy.vision.model_config import is_vision_model
from proxy.vision.processor import VisionProcessor
from tokengrove.errors import ConfigurationError, InvalidRequest, UnsupportedParameter, brief
from tokengrove.reasons import FinishReason

log = logging.getLogger(__name__)

# The number of pairs of parsers, named by requests, that are cached.
_READERS = 16
# The number of reasoning efforts whose acceptance is cached.
_EFFORTS = 16


def new_call_id() -> str:
    """Return an id for a tool call."""
    return f"call_{uuid.uuid4().hex}"


def load_renderer(settings: Settings, folder: Path) -> Renderer:
    """Load the renderer of the model in `folder`. Raises ConfigurationError (one line) if the folder is unusable."""
    check_names(settings)
    check_folder(folder, settings.family)
    with doing(f"loading the tokenizer in {folder}"):
        tokenizer = Tokenizer.load(folder)
    found = load_image_tokens(tokenizer, folder)
    images = None if isinstance(found, str) else found
    with doing("checking the chat template"):
        choice = choose_template(tokenizer, folder, settings.family, settings.thinking_retention, images)
        if images is not None and choice.chat is None:
            found, images = f"{choice.template.engine} writes no images", None
        return Renderer(
            tokenizer,
            choice,
            stop_token_ids=stop_tokens(tokenizer, choice, folder),
            reasoning=choose_reasoning(choice, settings.reasoning_parser),
            tool_format=choose_tool_format(choice, settings.tool_parser),
            retention=settings.thinking_retention,
            images=images,
            blind=found if isinstance(found, str) else "",
        )


def load_image_tokens(tokenizer: Tokenizer, folder: Path) -> ImageTokens | str:
    """Return how images become tokens of the model in `folder`, or why they do not; "" if it is no vision model.

    A vision model answers text without its processor, so a missing package or a broken file is not an error.
    """
    if not is_vision_model(folder):
        return ""
    with doing(f"loading the processor in {folder}"):
        try:
            return ImageTokens(tokenizer, VisionProcessor.load(folder))
        except ConfigurationError as error:
            log.warning("images are refused: %s", error)
            return str(error)


def check_folder(folder: Path, family: str | None) -> None:
    """Raise ConfigurationError for a folder without a vocabulary, or without a chat template that `family` could
    replace, before anything is loaded."""
    require_vocabulary(folder)
    if not chat_templates(folder, read_json(folder / "tokenizer_config.json")):
        require_library(None if family is None else family_named(family), folder)


def check_names(settings: Settings) -> None:
    """Raise ConfigurationError for an unknown name, listing the known names, before anything is loaded."""
    for name, find in (
        (settings.family, family_named),
        (settings.tool_parser, tool_format),
        (settings.reasoning_parser, reasoning_format),
    ):
        if name is not None:
            find(name)


def check_tool_parser(name: str) -> ToolFormat:
    """Return the tool-call format of this name. Raises InvalidRequest (param tool_parser) listing the known names."""
    try:
        return tool_format(name)
    except ConfigurationError as error:
        raise InvalidRequest(str(error).replace("--tool-parser", "'tool_parser'"), param="tool_parser") from None


class Renderer:
    """Converts messages to ids and back for one model. Thread-safe.

    `images`: how images become tokens; None unless it is a vision model. `blind`: why a vision model accepts no images
    here; "" otherwise. `why`: how the family was found. `encoder` and `template_engine`: the engines that encode text
    and write the chat template's text, and why. `vocab_size`: the highest id in the vocabulary plus one.
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
        images: ImageTokens | None = None,
        blind: str = "",
    ) -> None:
        self.images, self.has_vision, self.blind = images, images is not None, blind
        self.placeholders: frozenset[int] = frozenset() if images is None else images.placeholders
        self._chat = choice.chat
        self.family = choice.family.name
        self.why = choice.why
        self.encoder = tokenizer.encoder
        self.template_engine = choice.template.engine if choice.chat is None else choice.chat.engine
        self.vocab_size = tokenizer.vocab_size
        self.stop_token_ids = stop_token_ids
        self.reasoning = reasoning
        self.tool_format = tool_format
        self._tokenizer = tokenizer
        self._template = choice.template
        self._keeps_reasoning = retention == "all"
        self._keeps_in_loops = choice.chat is None or choice.chat.capabilities.keeps_reasoning
        self._bridge = Bridge(tokenizer, choice.template, stop_token_ids, reasoning, tool_format)
        self._prefills = Prefills(tokenizer, choice.template, reasoning, self._bridge.reasoning_open)
        self._prompts = PromptCache()
        self._call_parsers = ParserFactory(tokenizer, stop_token_ids, reasoning, tool_format)
        self._text_parsers = ParserFactory(tokenizer, stop_token_ids, reasoning, None)
        self._warned = False
        self._choice, self._retention = choice, retention
        self._kept_efforts = lru_cache(_EFFORTS)(self._accepts_effort)
        self._kept_readers = lru_cache(_READERS)(self._reader)

    def render(
        self, messages: Sequence[Message], tools: Sequence[Tool], options: Mapping[str, Any], *, prompt: bool = True
    ) -> Ids:
        """Return the ids of the whole conversation, with the generation prompt if `prompt`.

        Raises InvalidRequest for what the template cannot express.
        """
        if self.blind:
            require_no_images(messages, self.blind)
        key = prompt_key(messages, tools, options) if prompt and self._template.timeless else None
        ids = None if key is None else self._prompts.get(key)
        if ids is None:
            ids = self._template.render(messages, tools, options, prompt=prompt)
            if key is not None:
                self._prompts.put(key, ids, count_characters(messages))
        return ids

    def knows_effort(self, effort: str) -> bool:
        """Return whether the chat template accepts this `reasoning_effort`, or reads none."""
        return self._kept_efforts(effort)

    def _accepts_effort(self, effort: str) -> bool:
        try:
            self._template.render([Message(Role.USER, "Probe-user")], (), {"reasoning_effort": effort})
        except InvalidRequest:
            return False
        return True

    def placed(self, ids: Ids, messages: Sequence[Message], start: int = 0) -> tuple[PlacedImage, ...]:
        """Return the places of the images of `messages` in `ids`, which were rendered from them.

        `start`: the number of prompt ids before `ids`.
        """
        return () if self.images is None else self.images.placed(ids, images_of(messages), start)

    @cached_property
    def sight(self) -> Sight | None:
        """The images that the model accepts; None if it accepts none."""
        if self.images is None or self._chat is None:
            return None
        example = self.images.count(ImagePart("", 0, *EXAMPLE))
        roles = tuple([str(role) for role in Role if role in self._chat.capabilities.images])
        return Sight(self.images.vision.name, roles, example)

    def no_images(self) -> InvalidRequest:
        """Return the error for images that the model does not accept."""
        return no_images(self.blind)

    def forget_prompts(self) -> None:
        """Free the memory of the latest prompts and texts."""
        self._prompts.clear()
        self._tokenizer.forget_texts()

    def bridge(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        *,
        prefilled: bool = False,
        generation_prompt: bool = True,
        images_before: int = 0,
    ) -> Ids | None:
        """Return the ids to append to `prompt_ids + output_ids`: the end of a cut turn, the new messages and, if
        `generation_prompt`, the beginning of the next answer. All of them are context, not sampled. None if the
        template is not append-only here: the conversation must then be rendered in full.

        `answer`: the message parsed from `output_ids`, after its beginning in the prompt if `prefilled`.
        `images_before`: the number of images in the prompt. Raises InvalidRequest for what the template cannot express.
        """
        if not self._keeps_reasoning and self._template_rewrites(new_messages):
            return None
        found = self.append(
            prompt_ids,
            output_ids,
            answer,
            new_messages,
            tools,
            options,
            prefilled=prefilled,
            generation_prompt=generation_prompt,
            images_before=images_before,
        )
        if found is None and not self._warned:
            self._warned = True
            log.warning(
                "the chat template is not append-only: a turn that rewrites history is rendered in full and forks"
            )
        return found

    def append(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Mapping[str, Any],
        *,
        prefilled: bool = False,
        generation_prompt: bool = True,
        images_before: int = 0,
    ) -> Ids | None:
        """Return the ids like `bridge`, but keep earlier reasoning whatever the settings are."""
        if self.images is None:
            require_no_images(new_messages, self.blind)
        return self._bridge.suffix(
            prompt_ids,
            output_ids,
            answer,
            new_messages,
            tools,
            options,
            prefilled=prefilled,
            generation_prompt=generation_prompt,
            images_before=images_before,
        )

    def prefilled(self, prompt_ids: Ids, prefill: Message, tools: Sequence[Tool], options: Mapping[str, Any]) -> Ids:
        """Return `prompt_ids`, with the beginning of the answer in place of the generation prompt at their end."""
        return self._prefills.added(prompt_ids, prefill, tools, options)

    def reading(self, tool_parser: str | None) -> Renderer:
        """Return this renderer with the tool-call format of this name; None: the model's own."""
        return self if tool_parser is None else self._kept_readers(tool_parser, None)

    def parser(
        self,
        tools: Sequence[Tool],
        tool_choice: ToolChoice,
        prompt_ids: Ids,
        stop: Sequence[str] = (),
        call_id: Callable[[], str] = new_call_id,
        prefill: Message | None = None,
    ) -> OutputParser:
        """Return a parser for one output after `prompt_ids`. `call_id` makes the ids of tool calls.

        `prefill`: the beginning of the answer, at the end of the prompt; the output continues its text. Without tools,
        or with tool choice `none`, tool calls stay text.
        """
        calls = bool(tools) and tool_choice.mode is not ToolChoiceMode.NONE
        return (self._call_parsers if calls else self._text_parsers).build(
            tools=tools,
            reasoning_open=prefill is None and self._bridge.reasoning_open(prompt_ids),
            stop=stop,
            call_id=call_id,
            begun=prefill,
        )

    def parse(self, ids: Ids, wanted: Parsing) -> tuple[Message, FinishReason]:
        """Return the message of a whole output, and its finish reason; `LENGTH` if there is no end token.

        Raises InvalidRequest for the name of an unknown parser.
        """
        reader = self._kept_readers(wanted.tool_parser, wanted.reasoning_parser)
        before = self._generation_prompt if wanted.prompt_ids is None else wanted.prompt_ids
        calls = bool(wanted.tools) or wanted.tool_parser is not None
        parser = (reader._call_parsers if calls else reader._text_parsers).build(
            tools=wanted.tools, reasoning_open=reader._bridge.reasoning_open(before), stop=(), call_id=new_call_id
        )
        parser.feed(ids)
        parser.finish()
        ended = any(token in self.stop_token_ids for token in ids)
        end = FinishReason.TOOL_CALLS if parser.message.tool_calls else FinishReason.STOP
        return parser.message, end if ended else FinishReason.LENGTH

    def plain_parser(self, stop: Sequence[str] = ()) -> OutputParser:
        """Return a parser for an output that is not a chat message: all of it is text, white space included."""
        return self._text_parsers.plain(stop)

    def tool_grammar(self, tools: Sequence[Tool], tool_choice: ToolChoice, parallel: bool) -> Grammar | None:
        """Return the grammar of a forced call for the modes `required` and `named`; None for other modes.

        Raises UnsupportedParameter if the model's call format is unknown or its arguments are not JSON, InvalidRequest
        if `tools` lacks the named tool.
        """
        if tool_choice.mode not in (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED):
            return None
        if self.tool_format is None:
            raise UnsupportedParameter(
                "tool calls of this model cannot be forced: its call format is unknown (--tool-parser names one)",
                param="tool_choice",
            )
        named = tool_choice.mode is ToolChoiceMode.NAMED
        chosen = [tool for tool in tools if not named or tool.name == tool_choice.name]
        if not chosen:
            raise InvalidRequest(
                f"'tool_choice' names {brief(tool_choice.name)}, which is not in 'tools'", param="tool_choice"
            )
        separator = self.tool_format.separator
        alternatives = tuple(self._call_parts(self.tool_format, tool) for tool in chosen)
        return Grammar(alternatives, repeat=parallel and separator is not None, separator=separator or "")

    def held_grammar(self, tools: Sequence[Tool]) -> Grammar:
        """Return the grammar of an answer of reasoning, text and calls, as the model likes, in which calls obey theirs.

        Raises UnsupportedParameter unless the model writes calls after a token of their own, with JSON arguments.
        """
        calls, reasoning, tokenizer = self.tool_format, self.reasoning, self._tokenizer
        alternatives = [] if calls is None else [self._call_parts(calls, tool) for tool in tools]
        marked = all(parts[0].token_id is not None for parts in alternatives)
        if calls is None or not marked or (reasoning is not None and (reasoning.channels or reasoning.hidden)):
            raise UnsupportedParameter(
                "the calls of this model have no token that begins them, or are part of other markup, so their "
                "grammar cannot be held while the model chooses freely; force a call with 'tool_choice', or leave out "
                "the 'format' of the tool",
                param="tools",
            )
        text = f"(?s:\\s+|\\s*[^\\s{re.escape(calls.bare)}].*)"
        around = () if reasoning is None else (reasoning.opener, reasoning.closer)
        marks = [GrammarPart(token_id=token) for mark in around if (token := tokenizer.token_id(mark)) is not None]
        parts = [(GrammarPart(regex=text),), *((mark,) for mark in marks), *alternatives]
        return Grammar(tuple(parts), repeat=True)

    def encode(self, text: str) -> Ids:
        """Return the ids of `text`. Special tokens spelled in it are encoded as special tokens."""
        return self._tokenizer.encode(text)

    def encode_prompt(self, text: str, *, special: bool = True) -> Ids:
        """Return the ids of a whole prompt; with `special`, after the ids that the tokenizer puts first (BOS)."""
        ids = self._tokenizer.encode(text)
        return self._tokenizer.opening + ids if special else ids

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of `ids`, with special tokens if `special`."""
        return self._tokenizer.decode(ids if special else self._tokenizer.without_special(ids))

    def raw_text(self, output_ids: Ids) -> str:
        """Return an output as the model wrote it, with the markup of calls and reasoning, without the end token.

        An end token that closes a call (Harmony's) is part of the call, and stays.
        """
        if output_ids and output_ids[-1] in self.stop_token_ids:
            end = self.piece(output_ids[-1]).decode("utf-8", "replace")
            if self.tool_format is None or end != self.tool_format.closer:
                output_ids = output_ids[:-1]
        return self._tokenizer.decode(output_ids)

    def piece(self, token: int) -> bytes:
        """Return the UTF-8 bytes of one token, possibly part of a character; empty for ids outside the vocabulary."""
        return self._tokenizer.piece(token)

    def has_tokens_of(self, other: Renderer) -> bool:
        """Return whether each id means the same token in both vocabularies. The first call reads them."""
        return self._tokenizer.vocabulary == other._tokenizer.vocabulary

    def is_special(self, token: int) -> bool:
        """Return whether the tokenizer counts a token as special: a marker, not text."""
        return self._tokenizer.is_special(token)

    @cached_property
    def _generation_prompt(self) -> Ids:
        """The end of a prompt that the template writes without options."""
        return self.render([Message(Role.USER, "Synthesized question")], (), {})

    def _reader(self, tool_parser: str | None, reasoning_parser: str | None) -> Renderer:
        """Return this renderer with other output formats; None: its own."""
        if tool_parser is None and reasoning_parser is None:
            return self
        calls = self.tool_format if tool_parser is None else check_tool_parser(tool_parser)
        try:
            reasoning = self.reasoning if reasoning_parser is None else reasoning_format(reasoning_parser)
        except ConfigurationError as error:
            message = str(error).replace("--reasoning-parser", "'reasoning_parser'")
            raise InvalidRequest(message, param="reasoning_parser") from None
        return Renderer(
            self._tokenizer,
            self._choice,
            stop_token_ids=self.stop_token_ids,
            reasoning=reasoning,
            tool_format=calls,
            retention=self._retention,
            images=self.images,
            blind=self.blind,
        )

    def _call_parts(self, calls: ToolFormat, tool: Tool) -> tuple[GrammarPart, ...]:
        """Return the grammar of a forced call, with markers as token ids if the vocabulary has them."""
        marks = [calls.opener, calls.closer, *calls.marks]
        tokens = {mark: token for mark in marks if mark and (token := self._tokenizer.token_id(mark)) is not None}
        return tuple(piece for part in calls.forced(tool) for piece in _pieces(part, tokens))

    def _template_rewrites(self, new_messages: Sequence[Message]) -> bool:
        """Return whether the template may drop earlier reasoning: at a user message; some also do after a tool call."""
        in_loop = bool(new_messages) and all(message.role is Role.TOOL for message in new_messages)
        return not (in_loop and self._keeps_in_loops)


def _pieces(part: GrammarPart, tokens: Mapping[str, int]) -> Iterator[GrammarPart]:
    if part.schema is not None:
        yield part
        return
    for text, is_mark in split_marks(part.text, tuple(tokens)):
        yield GrammarPart(text=text, token_id=tokens[text]) if is_mark else GrammarPart(text=text)
