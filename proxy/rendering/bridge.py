"""The bridge from one turn to the next: the parent's tokens stay unchanged, and only new messages are rendered.

The ids to append depend on the end of the parent and on the new messages, never on the length of the history. To find
them, the bridge renders a short synthetic conversation with and without the new messages. The ids that the second
rendering adds are used only if both renderings agree, token by token, up to the end of the synthetic answer. Otherwise
the template is not append-only here, and the result is None. The common beginning is kept: a later rendering of the
same kind that begins with the same ids needs no comparison.

A turn that was cut off (length, stop string, abort) is closed first, as context: its open reasoning, then the turn. A
closed turn is never closed again, whatever end token the model chose: if a template writes another token in history
than the model samples (gpt-oss: `<|end|>` for `<|return|>`), the sampled token stays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter

from proxy.rendering.reasoning_formats import ReasoningFormat
from proxy.rendering.templates.call_ids import sampled_call_ids, samples_call_ids
from proxy.rendering.templates.chat_template import ChatTemplate, Options, Template
from proxy.rendering.templates.library_template import LibraryTemplate
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.tool_format import ToolFormat
from proxy.types import Ids, ImagePart, Message, Role, Tool, ToolCall, ids_of
from tokengrove.errors import InvalidRequest

# No generation prompt is longer than this many tokens, so the last TAIL tokens of a prompt contain it.
TAIL = 64
# The number of output tokens that show, unless they are white space, whether the output begins with reasoning.
_FIRST = 16

# Letters and spaces only, so that every vocabulary tokenizes them alike in any context.
_USER = "Synthesized question"
_ANSWER = "Synthesized answer"
_SECOND = "Synthesized follow up"
_SYSTEM = Message(Role.SYSTEM, "Synthesized rules")
_TOOL = Tool("synthesized", "", {})

# The maximum number of kept openings and generation prompts: their keys contain template options, names of tools and
# ids, which clients choose.
_KEPT = 64

_role_of = attrgetter("role")


@dataclass(frozen=True, slots=True)
class _Frame:
    """The head of the synthetic conversation: its tools, its images, and whether it has a system message."""

    tools: tuple[Tool, ...] = ()
    system: bool = False
    images: tuple[ImagePart, ...] = ()

    def history(self, answer: Message) -> list[Message]:
        return [*([_SYSTEM] if self.system else []), Message(Role.USER, _USER, images=self.images), answer]


@dataclass(frozen=True, slots=True)
class _Opening:
    """The beginning of renderings of one kind of synthetic conversation, up to the end of the answer.

    `closing`: the last ids of `ids`, which end the answer's turn (with an end token if `closes`).
    """

    ids: Ids
    closing: Ids
    closes: bool


class Bridge:
    """Extends prompts of one template. `stop_token_ids`: the ids that end a turn when sampled."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        stop_token_ids: Sequence[int],
        reasoning: ReasoningFormat | None,
        tool_format: ToolFormat | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._stops = frozenset(stop_token_ids)
        self._reasoning = reasoning
        self._tool_format = tool_format
        self._library = template if isinstance(template, LibraryTemplate) else None
        self._samples_call_ids = tool_format is not None and samples_call_ids(tool_format.opener)
        self._openings: dict[object, _Opening] = {}
        self._kept_opened = lru_cache(_KEPT)(self._find_opened)

    def suffix(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Options,
        *,
        prefilled: bool = False,
        generation_prompt: bool = True,
        images_before: int = 0,
    ) -> Ids | None:
        """Return the ids to append to `prompt_ids + output_ids`, all context; None if the template is not append-only
        here. `prefilled`: the prompt ends with text of the answer. `generation_prompt`: whether an answer begins after
        the new messages. `images_before`: the number of images in the prompt. Raises InvalidRequest."""
        tail = self._header(prompt_ids)
        if prefilled and self._opened(tail):
            tail = self._closer_ids  # the text of an answer is never reasoning
        if answer.tool_calls and (self._samples_call_ids or self._library is not None):
            answer, new_messages = _referring(answer, new_messages, lambda: self._tokenizer.decode(output_ids))
        found = None
        if self._library is not None and generation_prompt:
            found = self._from_library(self._library, tail, output_ids, new_messages, options)
        if found is None:
            before = self._counted(images_before, new_messages, options) if images_before else ()
            frames = _frames(new_messages, tools, before)
            found = self._from_template(tail, output_ids, answer, new_messages, frames, options, generation_prompt)
        return found

    def reasoning_open(self, prompt_ids: Ids) -> bool:
        """Return whether the generation prompt opens the reasoning and leaves it open."""
        return self._kept_opened(tuple(self._header(prompt_ids)))

    def _header(self, prompt_ids: Ids) -> Ids:
        """Return the generation prompt: the end of the prompt, after its last end-of-turn token."""
        tail = prompt_ids[-TAIL:]
        for at in range(len(tail) - 1, -1, -1):
            if tail[at] in self._stops:
                return tail[at + 1 :]
        return tail

    def _from_library(
        self, library: LibraryTemplate, tail: Ids, output_ids: Ids, new_messages: Sequence[Message], options: Options
    ) -> Ids | None:
        """Return the library renderer's own bridge, or None.

        The library drops everything after an end token and rejects unclosed reasoning, so it is given neither.
        """
        if not new_messages or any(message.role is Role.ASSISTANT for message in new_messages):
            return None
        if output_ids and output_ids[-1] in self._stops:
            closed = self._closer_ids if self._opened(tail) else ids_of()
            return library.extend(tail, closed + output_ids[-1:], new_messages, options)
        if any(stop in output_ids for stop in self._stops):
            return None
        return library.extend(tail, output_ids, new_messages, options)

    def _from_template(
        self,
        tail: Ids,
        output_ids: Ids,
        answer: Message,
        new_messages: Sequence[Message],
        frames: Iterable[_Frame],
        options: Options,
        generation_prompt: bool,
    ) -> Ids | None:
        synthetic = _synthetic(answer)
        for frame in frames:
            try:
                messages = [*frame.history(synthetic), *new_messages]
                after = self._template.render(messages, frame.tools, options, prompt=generation_prompt)
                opening = self._opening(after, frame, synthetic, new_messages, options)
            except InvalidRequest:
                # Not fatal: rendering the whole conversation decides whether the template can express it.
                continue
            if opening is not None:
                return self._after(tail, output_ids, opening, after[len(opening.ids) :])
        return None

    def _counted(self, before: int, new_messages: Sequence[Message], options: Options) -> tuple[ImagePart, ...]:
        """Return as many images as precede the new messages, if the template numbers images; else none."""
        sizes = (image for message in new_messages for image in message.images)
        image = next(sizes, None)
        if image is None or not isinstance(self._template, ChatTemplate) or not self._template.numbers_images(options):
            return ()
        return (image._replace(at=0),) * before

    def _after(self, tail: Ids, output_ids: Ids, opening: _Opening, rest: Ids) -> Ids:
        """Return the ids after the output: the end of its turn, if it is still open, and `rest`."""
        last = output_ids[-1] if output_ids else None
        if opening.closes and (last in self._stops or last == opening.closing[-1]):
            return rest
        if last in self._stops:
            # The family ends a turn by opening the next one; the model may already have sampled the right opener.
            return rest[1:] if rest and rest[0] == last else opening.closing + rest
        closing = self._closer_ids if self._left_open(tail, output_ids) else ids_of()
        closing = closing + opening.closing[self._overlap(closing, opening.closing) :]
        return closing[self._overlap(output_ids[-len(closing) :], closing) if closing else 0 :] + rest

    def _overlap(self, ids: Ids, closing: Ids) -> int:
        """Return the number of markers at the start of `closing` that are already at the end of `ids`."""
        for size in range(min(len(ids), len(closing)), 0, -1):
            if ids[-size:] == closing[:size] and all(map(self._tokenizer.is_marker, closing[:size])):
                return size
        return 0

    def _opening(
        self, after: Ids, frame: _Frame, answer: Message, new_messages: Sequence[Message], options: Options
    ) -> _Opening | None:
        """Return the beginning of `after`, up to the end of the synthetic answer, or None if it rewrites the answer.

        A kept opening is used only if `after` begins with its ids: a template may write the date or the ids of calls.
        """
        names = tuple([call.name for call in answer.tool_calls])
        roles = frozenset(map(_role_of, new_messages))
        kind = (bool(frame.tools), frame.system, len(frame.images), names, roles, repr(options))
        kept = self._openings.get(kind)
        if kept is not None and after[: len(kept.ids)] == kept.ids:
            return kept
        before = self._template.render(frame.history(answer), frame.tools, options, prompt=False)
        found = self._compare(before, after, calls=bool(names))
        if found is not None:
            if len(self._openings) >= _KEPT:
                self._openings.clear()
            self._openings[kind] = found
        return found

    def _compare(self, before: Ids, after: Ids, *, calls: bool) -> _Opening | None:
        """Return the beginning of `after`, or None unless it repeats `before` up to the end of the answer's turn.

        Reasoning markers in the answer itself may differ. `calls`: the answer has tool calls.
        """
        limit = len(before) + TAIL
        answered, times = self._find(before, _ANSWER, len(before)), self._count(before, _ANSWER)
        asked = self._find(before, _USER, len(before), 1)
        goes_on = self._find(after, _ANSWER, limit, times)
        if answered is None or goes_on is None or asked is None or before[:asked] != after[:asked]:
            return None
        close = next((at for at in range(answered, len(before)) if before[at] in self._stops), None)
        fixed = before[answered:] if close is None else before[answered : close + 1]
        found = after[goes_on : goes_on + len(fixed)]
        if found != fixed:
            last = found[-1] if found else None
            if close is None or found[:-1] != fixed[:-1] or last is None or last != self._closer_in_history:
                return None
        # With calls, `found` begins with the rest of the synthetic call: only the end token is usable.
        closing = found if not calls else found[-1:] if close is not None else ids_of()
        return _Opening(after[: goes_on + len(fixed)], closing, closes=close is not None)

    @cached_property
    def _closer_in_history(self) -> int | None:
        """The marker that the template writes after an earlier answer, if it writes an end token after the last one.

        The marker must not depend on what follows the answer, and must not be a marker that opens a turn.
        """
        history = _Frame().history(Message(Role.ASSISTANT, _ANSWER))
        second = [*history, Message(Role.USER, _SECOND)]
        try:
            asked = self._template.render(history[:1], (), {}, prompt=False)
            header = self._template.render(history[:1], (), {})
            shown = [self._template.render(messages, (), {}) for messages in (history, second)]
        except InvalidRequest:
            return None
        ends = [self._find(ids, _ANSWER, len(ids)) for ids in shown]
        written = {tuple(ids[end : end + 1]) for ids, end in zip(shown, ends, strict=True) if end is not None}
        closer = next(iter(written), ())
        if len(written) != 1 or not closer or closer[0] in header[len(asked) :]:
            return None
        return closer[0] if self._tokenizer.is_marker(closer[0]) else None

    def _find(self, ids: Ids, text: str, limit: int, times: int | None = None) -> int | None:
        """Return the index after the token that completes occurrence `times` (default: the last) of `text`."""
        pieces = [self._tokenizer.piece(token) for token in ids[:limit]]
        joined, needle = b"".join(pieces), text.encode()
        count = joined.count(needle) if times is None else times
        end = 0
        for _ in range(count):
            at = joined.find(needle, end)
            if at < 0:
                return None
            end = at + len(needle)
        return _token_at(pieces, end) if end else None

    def _count(self, ids: Ids, text: str) -> int:
        return b"".join(map(self._tokenizer.piece, ids)).count(text.encode())

    def _left_open(self, tail: Ids, output_ids: Ids) -> bool:
        """Return whether the output ends inside reasoning. A tool call closes the reasoning, as in the parser."""
        reasoning, calls = self._reasoning, self._tool_format
        if reasoning is None or not (self._opened(tail) or self._begins_with(reasoning.opener, output_ids)):
            return False
        text = self._text(output_ids)
        return reasoning.closer not in text and (calls is None or calls.opener not in text)

    def _begins_with(self, opener: str, output_ids: Ids) -> bool:
        """Return whether the output begins with `opener`, after white space. Usually, its first tokens suffice."""
        text = self._text(output_ids[:_FIRST]).lstrip()
        if len(text) < len(opener):
            text = self._text(output_ids).lstrip()
        return text.startswith(opener)

    def _opened(self, header: Ids) -> bool:
        """Return whether `header` ends inside reasoning. Cached: turns share the same few generation prompts."""
        return self._kept_opened(tuple(header))

    def _find_opened(self, header: Sequence[int]) -> bool:
        if self._reasoning is None:
            return False
        text = self._text(header)
        opened, closed = text.rfind(self._reasoning.opener), text.rfind(self._reasoning.closer)
        return opened > closed or (self._reasoning.forced and closed < 0)

    def _text(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without an incomplete character at its end. This is faster than `decode`."""
        return self._tokenizer.detokenizer().push(ids)

    @cached_property
    def _closer_ids(self) -> Ids:
        return self._tokenizer.encode(self._reasoning.closer if self._reasoning is not None else "")


def _frames(new_messages: Sequence[Message], tools: Sequence[Tool], images: tuple[ImagePart, ...]) -> Iterator[_Frame]:
    """Yield the heads to try, the ordinary head first, each with these images.

    Some templates write the tools only before the last question (Mistral): a head without tools does not repeat them.
    Some move the first system message to the head (Cohere): if a head has one, a new one stays in its place.
    """
    head = (_TOOL,) if tools else ()
    yield _Frame(head, images=images)
    if tools:
        yield _Frame(images=images)
    if any(message.role is Role.SYSTEM for message in new_messages):
        yield _Frame(head, system=True, images=images)


def _synthetic(answer: Message) -> Message:
    """Return a short answer of the same kind. Its calls keep the ids and names that tool results refer to."""
    calls = tuple(ToolCall(call.id, call.name, f'{{"text": "{_ANSWER}"}}') for call in answer.tool_calls)
    return Message(Role.ASSISTANT, "" if calls else _ANSWER, calls)


def _referring(
    answer: Message, new_messages: Sequence[Message], text: Callable[[], str]
) -> tuple[Message, Sequence[Message]]:
    """Give tool results the name of their call, and the call id that the model sampled in `text`, if it did."""
    sampled = sampled_call_ids(answer.tool_calls, text)
    calls = tuple(call._replace(id=sampled.get(call.id, call.id)) for call in answer.tool_calls)
    names = {call.id: call.name for call in answer.tool_calls}
    renamed = [
        message._replace(
            tool_call_id=sampled.get(message.tool_call_id or "", message.tool_call_id),
            name=message.name or names.get(message.tool_call_id or ""),
        )
        if message.role is Role.TOOL
        else message
        for message in new_messages
    ]
    return answer._replace(tool_calls=calls), renamed


def _token_at(pieces: Sequence[bytes], end: int) -> int:
    length = 0
    for index, piece in enumerate(pieces):
        length += len(piece)
        if length >= end:
            return index + 1
    return len(pieces)
