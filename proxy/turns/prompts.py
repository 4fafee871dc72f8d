"""The prompt of a turn: its parent in the tree, and the exact token ids for the engine.

With a parent, the prompt is the parent's stored token ids plus the tokens of the new messages. Earlier text is never
tokenized again.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from xxhash import xxh3_64_intdigest

from proxy.engine.grammar import Grammar, GrammarPart
from proxy.prompt_ids import PromptIds
from proxy.rendering.bridge import TAIL
from proxy.rendering.given_images import locate
from proxy.rendering.image_tokens import ImageTokens, images_of
from proxy.rendering.renderer import Renderer
from proxy.rendering.token_bound import at_most
from proxy.resources.fair_pool import FairPool
from proxy.resources.senders import Sender
from proxy.sessions.live_session import LiveSession
from proxy.trajectory.cache import Match, Node
from proxy.trajectory.echoes import restore
from proxy.trajectory.matching import Identity, extend, identify
from proxy.turns.history import with_messages
from proxy.types import (
    TOKENS,
    Api,
    Continued,
    Ids,
    ImagePart,
    Message,
    Parsing,
    PlacedImage,
    PromptText,
    ResponseFormat,
    Role,
    Tool,
    ToolChoice,
    ToolChoiceMode,
    TurnRequest,
)
from tokengrove.errors import InvalidRequest
from tokengrove.reasons import Echo, FinishReason

# Longer conversations are rendered in a worker thread, so that they do not block the event loop. Each message and tool
# takes as long as some hundred characters.
_INLINE_CHARS = 40_000
_CHARS_A_MESSAGE, _CHARS_A_TOOL = 200, 800
_INLINE_TOKENS = 8_000

_T = TypeVar("_T")

_ASSISTANT = Role.ASSISTANT
FORCED = (ToolChoiceMode.REQUIRED, ToolChoiceMode.NAMED)
"""The modes in which the output has to call a tool."""
_role_of = attrgetter("role")


class Prompt(NamedTuple):
    """Token ids for the engine, and the parent that they should continue. `bridged` False: rendered in full.

    `messages`: the conversation of the ids, with our own answers in place of the echoes that the client changed.
    `echo`: those changes. `identity`: the identity of `messages`. `images`: all images of the prompt, in order.
    """

    ids: PromptIds
    match: Match
    messages: tuple[Message, ...]
    identity: Identity
    bridged: bool
    echo: tuple[Echo, ...] = ()
    images: tuple[PlacedImage, ...] = ()


class Prompts:
    """Builds prompts with one renderer. Long prompts are built in the threads of `pool`."""

    def __init__(self, renderer: Renderer, pool: FairPool) -> None:
        self._renderer, self._pool = renderer, pool
        self._images = renderer.images

    async def build(
        self,
        session: LiveSession,
        request: TurnRequest,
        identity: Identity,
        most: int,
        generation_prompt: bool = True,
    ) -> Prompt:
        """Bridge from the parent if there is one and the template allows it, else render all messages.

        Raises TooManyTokens for a prompt that is certain to have more than `most` tokens. A returned prompt may still
        have more.
        """
        match = session.cache.find_parent(request, identity)
        echo: tuple[Echo, ...] = ()
        # Only an answer without a node, or with other call ids than its node, can be an echo that the client changed.
        if match.renamed or _ASSISTANT in map(_role_of, request.messages[match.covered :]):
            exact = 0 if match.renamed else match.covered
            restored = restore(session.cache, request.messages, identity, request.tools, exact)
            if restored is not None:
                messages, identity, echo = restored
                request = with_messages(request, messages)
                match = session.cache.find_parent(request, identity)
        request.timeline.matched = time.monotonic()
        if match.parent is not None:
            if match.parent.images and self._images is None:
                raise self._renderer.no_images()
            bridged = await self._bridge(session, request, match, match.parent, most, generation_prompt)
            if bridged is not None:
                images = () if self._images is None else _extended(self._images, match, request, bridged)
                return Prompt(bridged, match, request.messages, identity, bridged=True, echo=echo, images=images)
        ids = PromptIds(await self.render(request, most, request.sender, generation_prompt))
        images = () if self._images is None else self._images.placed(ids.joined, images_of(request.messages))
        return Prompt(ids, match, request.messages, identity, bridged=False, echo=echo, images=images)

    async def anew(self, session: LiveSession, request: TurnRequest, prompt: Prompt, most: int) -> Prompt:
        """Return a bridged prompt rendered in full, without its parent's tokens. Raises TooManyTokens like `build`."""
        ids = PromptIds(await self.render(with_messages(request, prompt.messages), most, request.sender))
        images = () if self._images is None else self._images.placed(ids.joined, images_of(prompt.messages))
        return prompt._replace(ids=ids, bridged=False, images=images)

    async def render(self, request: TurnRequest, most: int, sender: Sender, generation_prompt: bool = True) -> Ids:
        """Return the ids of all messages. Raises TooManyTokens like `build`."""
        work = _work(request.messages, request.prefill)
        if request.tools:
            work += _work_of_tools(request.tools)
        if self._images is not None:
            work += self._images.work(images_of(request.messages))
        if work <= _INLINE_CHARS and request.prefill is None:
            return self._renderer.render(
                request.messages, request.tools, request.template_options, prompt=generation_prompt
            )
        return await self._do(sender, work, most, self._render, request, generation_prompt)

    def _render(self, request: TurnRequest, generation_prompt: bool = True) -> Ids:
        renderer = self._renderer
        ids = renderer.render(request.messages, request.tools, request.template_options, prompt=generation_prompt)
        return ids if request.prefill is None else self._with_prefill(ids, request)

    async def given(self, session: LiveSession, request: TurnRequest, ids: Ids) -> Prompt:
        """Return the prompt of a request that has token ids.

        The parent is the deepest node with tokens and images that are a prefix of the request's. The conversation is
        the parent's, plus one user message with the text of the remaining tokens.
        """
        images: tuple[PlacedImage, ...] = ()
        if request.images or self._images is not None:
            try:
                ids, images = await self.located(ids, request.images, request.sender)
            except InvalidRequest as error:
                if request.api is Api.COMPLETIONS:
                    error.param = "prompt"
                raise
        parent = session.cache.find_prefix(ids, images, request.route)
        request.timeline.matched = time.monotonic()
        known = 0 if parent is None else parent.length
        added = ids[known:]
        name = f"{TOKENS}{xxh3_64_intdigest(added.tobytes()):016x}"
        text, parts = await self._read(ids, known, images, request.sender) if images else (None, ())
        text = await self.decode(added, request.sender) if text is None else text
        new = Message(Role.USER, text, name=name, images=parts)
        if parent is None:
            identity = identify((new,), (), {}, request.route)
            return Prompt(PromptIds(ids), Match(None, 0), (new,), identity, bridged=True, images=images)
        before = session.cache.conversation(parent)
        states = (parent.end, extend(parent.end, [new])[-1])
        identity = Identity(parent.root, len(before), states)
        match = Match(parent, len(before))
        return Prompt(parent.ids.extended(added), match, (*before, new), identity, bridged=True, images=images)

    async def located(
        self, ids: Ids, images: Sequence[ImagePart], sender: Sender
    ) -> tuple[Ids, tuple[PlacedImage, ...]]:
        """Return the ids of a prompt with its images expanded, and the places of the images.

        Raises InvalidRequest if the ids do not have the tokens of `images`.
        """
        if self._images is None:
            if images:
                raise self._renderer.no_images()
            return ids, ()
        work = self._images.work(images) + len(ids)
        return await self._do(sender, work, sys.maxsize, locate, self._images, ids, images)

    async def _read(
        self, ids: Ids, known: int, images: Sequence[PlacedImage], sender: Sender
    ) -> tuple[str, tuple[ImagePart, ...]]:
        """Return the text of the ids after the first `known` ones, and the images in it."""
        text, parts = "", list[ImagePart]()
        for image in images:
            if image.start < known:
                continue
            text += await self.decode(ids[known : image.start], sender)
            parts.append(ImagePart(image.digest, len(text), image.width, image.height, image.detail))
            known = image.start + image.length
        return text + await self.decode(ids[known:], sender), tuple(parts)

    async def continued(
        self, request: TurnRequest, known: Continued, most: int, sender: Sender, generation_prompt: bool
    ) -> Ids:
        """Return the ids of `known`, followed by the ids of the messages after it.

        Raises InvalidRequest if the chat template does more than append here, and TooManyTokens like `build`.
        """
        cut = len(known.ids) - known.output_tokens
        answer, new = request.messages[known.messages - 1], request.messages[known.messages :]

        def append() -> Ids:
            suffix = self._renderer.append(
                known.ids[max(0, cut - TAIL) : cut],
                known.ids[cut:],
                answer,
                new,
                request.tools,
                request.template_options,
                generation_prompt=generation_prompt,
                images_before=len(images_of(request.messages[: known.messages])) if self._images is not None else 0,
            )
            if suffix is None:
                self._render(request)  # raises if the template cannot render these messages at all
                raise InvalidRequest(
                    "the chat template rewrites what stands before these messages, so 'continue_from' cannot go on "
                    "with its ids; leave it out, and all messages are rendered",
                    param="continue_from",
                )
            return self._with_prefill(suffix, request)

        work = _work(new, request.prefill)
        if self._images is not None:
            work += self._images.work(images_of(new))
        return known.ids + await self._do(sender, work, most - len(known.ids), append)

    async def parse(self, ids: Ids, wanted: Parsing, sender: Sender) -> tuple[Message, FinishReason]:
        """Return the message of an output outside of turns, and its finish reason, like `Renderer.parse`."""
        parse = self._renderer.parse
        if len(ids) <= _INLINE_TOKENS:
            return parse(ids, wanted)
        return await self._pool.run(sender, len(ids), parse, ids, wanted)

    async def encode(self, prompt: PromptText, most: int, sender: Sender) -> Ids:
        """Return the ids of a text prompt. Raises TooManyTokens like `build`."""
        encode = partial(self._renderer.encode_prompt, special=prompt.special)
        return await self._do(sender, len(prompt.text), most, encode, prompt.text)

    async def decode(self, ids: Ids, sender: Sender, *, special: bool = True) -> str:
        """Return the text of `ids`, with special tokens if `special`."""
        decode = partial(self._renderer.decode, special=special)
        return decode(ids) if len(ids) <= _INLINE_TOKENS else await self._pool.run(sender, len(ids), decode, ids)

    async def _do(self, sender: Sender, work: int, most: int, function: Callable[..., _T], *arguments: Any) -> _T:
        """Call a rendering function: inline if it is short, else in a worker thread, scheduled fairly by `sender`."""
        if work <= _INLINE_CHARS:
            return function(*arguments)
        return await self._pool.run(sender, work, _bounded, most, function, *arguments)

    async def _bridge(
        self,
        session: LiveSession,
        request: TurnRequest,
        match: Match,
        parent: Node,
        most: int,
        generation_prompt: bool,
    ) -> PromptIds | None:
        """Return the parent's exact tokens, then the tokens of the new messages; None if they cannot be bridged."""
        answer = parent.interaction
        # The bridge needs only the end of the parent's prompt, which may be long.
        before = parent.ids.tail(TAIL + len(answer.output_ids))[: -len(answer.output_ids) or None]
        new = match.new_messages(request.messages)

        def bridge() -> Ids | None:
            suffix = self._renderer.reading(request.tool_parser).bridge(
                before,
                answer.output_ids,
                answer.output,
                new,
                request.tools,
                request.template_options,
                prefilled=answer.prefill > 0,
                generation_prompt=generation_prompt,
                images_before=len(parent.images),
            )
            return None if suffix is None else self._with_prefill(suffix, request)

        work = _work(new, request.prefill)
        if self._images is not None:
            work += self._images.work(images_of(new))
        suffix = await self._do(request.sender, work, most - len(parent.ids), bridge)
        return None if suffix is None else parent.ids.extended(suffix)

    def _with_prefill(self, ids: Ids, request: TurnRequest) -> Ids:
        """Return the end of a prompt, followed by the beginning of the answer if the client wrote one."""
        if request.prefill is None:
            return ids
        return self._renderer.prefilled(ids, request.prefill, request.tools, request.template_options)

    def check_vocabulary(self, ids: PromptIds, most: int, request: TurnRequest) -> None:
        """Raise InvalidRequest for a token id of `most` or more: no such token exists, and some engines crash."""
        rendered = request.input_ids is None
        if (not rendered or self._renderer.vocab_size > most) and ids.largest >= most:
            param = "messages" if rendered else "prompt" if request.api is Api.COMPLETIONS else "input_ids"
            raise InvalidRequest(
                f"the prompt has token {ids.largest}, but the model's token ids end at {most - 1}", param=param
            )

    def grammar(self, request: TurnRequest) -> Grammar | None:
        """Return the grammar of the output, or None.

        It is a forced tool call, the response format, or either of the two if the model may call tools. If a tool has a
        grammar, it is everything that the model may write, with calls as their tools demand.
        """
        if request.response_format is None and request.tool_choice.mode not in FORCED:
            if not request.tools or held_tool(request) is None:
                return None
            return self._renderer.reading(request.tool_parser).held_grammar(request.tools)
        renderer = self._renderer.reading(request.tool_parser)
        forced = renderer.tool_grammar(request.tools, request.tool_choice, request.parallel_tool_calls)
        if forced is not None or request.response_format is None:
            return forced
        calls: tuple[tuple[GrammarPart, ...], ...] = ()
        if request.tools and request.tool_choice.mode is ToolChoiceMode.AUTO:
            required = renderer.tool_grammar(request.tools, ToolChoice(ToolChoiceMode.REQUIRED), False)
            calls = required.alternatives if required is not None else ()
        answers = tuple((part,) for part in _answers(request.response_format))
        return Grammar((*answers, *calls), param=request.response_format.param)


def held_tool(request: TurnRequest) -> int | None:
    """Return the index of the first tool whose calls have a grammar, if the model may call tools; None: there is none.

    A forced call has a grammar in any case.
    """
    if not request.tools or request.tool_choice.mode is ToolChoiceMode.NONE:
        return None
    return next((index for index, tool in enumerate(request.tools) if tool.pattern is not None), None)


def _answers(wanted: ResponseFormat) -> tuple[GrammarPart, ...]:
    """Return the alternatives of a response format."""
    if wanted.choices:
        return tuple(GrammarPart(text=choice) for choice in wanted.choices)
    if wanted.regex is not None:
        return (GrammarPart(regex=wanted.regex),)
    if wanted.ebnf is not None:
        return (GrammarPart(ebnf=wanted.ebnf),)
    return (GrammarPart(schema={"type": "object"} if wanted.schema is None else wanted.schema),)


def _bounded(most: int, function: Callable[..., _T], *arguments: Any) -> _T:
    with at_most(most):
        return function(*arguments)


def _extended(images: ImageTokens, match: Match, request: TurnRequest, ids: PromptIds) -> tuple[PlacedImage, ...]:
    """Return the images of a bridged prompt: the parent's images, then the images of the new messages."""
    assert match.parent is not None
    added, new = ids.last, match.new_messages(request.messages)
    return match.parent.images + images.placed(added, images_of(new), len(ids) - len(added))


def _work(messages: Sequence[Message], prefill: Message | None) -> int:
    """Return the cost of rendering messages, in characters."""
    work = 0 if prefill is None else len(prefill.content) + len(prefill.reasoning or "")
    for message in messages:
        work += _CHARS_A_MESSAGE + len(message.content) + len(message.reasoning or "")
        for call in message.tool_calls:
            work += _CHARS_A_MESSAGE + len(call.arguments)
    return work


def _work_of_tools(tools: Sequence[Tool]) -> int:
    """Return the cost of rendering tools, in characters."""
    work = _CHARS_A_TOOL * len(tools)
    for tool in tools:
        # `repr` accepts every value, and its depth is limited only by Python's recursion limit.
        work += max(len(tool.description) + len(repr(tool.parameters)) - _CHARS_A_TOOL, 0)
    return work
