"""Appending to what the model saw: the tokens of a parent stay as they are, only what is new is rendered.

The ids to append depend on the end of the parent and on the new messages, never on the length of the history. They
are what the template writes after an answer: found by rendering the new messages after a short synthetic answer, and
taken only if the new messages left everything before them as it was (proof by token prefix). Where they did not, the
template is not append-only here and the answer is None.

A turn that was cut (length, stop string, abort) is closed first, as context; reasoning left open at the cut is closed
before that. A closed turn is never closed again, whatever end token the model chose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.errors import InvalidRequest
from proxy.rendering.template import Options, Template
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_formats import ReasoningFormat, ToolFormat
from proxy.types import Ids, Message, Role, Tool, ToolCall, ids_of

# No generation prompt is longer than this many tokens, so the assistant header that it ends with lies within.
TAIL = 64

# Letters only, so that every vocabulary spells them alike wherever they stand.
_USER = "Synthesized question"
_ANSWER = "Synthesized answer"
_TOOL = Tool("synthesized", "", {})


@dataclass(frozen=True, slots=True)
class _Ends:
    """What follows a synthetic answer: `closing` ends its turn (with an end token if `closes`), then comes `rest`."""

    closing: list[int]
    rest: list[int]
    closes: bool


class Bridge:
    """Extends prompts of one template. `stop_token_ids` are those that end a turn when sampled."""

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

    def suffix(
        self,
        prompt_ids: Ids,
        output_ids: Ids,
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Options,
    ) -> Ids | None:
        """The ids to append after `prompt_ids + output_ids`, all of them context, or None. Raises InvalidRequest."""
        tail = self._header(prompt_ids)
        found = self._from_library(tail, output_ids, new_messages, options)
        if found is None:
            found = self._from_template(tail, output_ids, answer, new_messages, tools, options)
        return None if found is None else ids_of(found)

    def reasoning_open(self, prompt_ids: Ids) -> bool:
        """Whether the generation prompt has opened the reasoning and left it open."""
        return self._opened(self._header(prompt_ids))

    def _header(self, prompt_ids: Ids) -> list[int]:
        """The end of the prompt from its last end of turn on: the generation prompt."""
        tail = prompt_ids[-TAIL:].tolist()
        start = next((at + 1 for at in range(len(tail) - 1, -1, -1) if tail[at] in self._stops), 0)
        return tail[start:]

    def _from_library(
        self, tail: list[int], output_ids: Ids, new_messages: Sequence[Message], options: Options
    ) -> list[int] | None:
        """The library drops what follows an end token and refuses reasoning that was never closed: it sees neither."""
        if not new_messages or any(message.role is Role.ASSISTANT for message in new_messages):
            return None
        if output_ids and output_ids[-1] in self._stops:
            closed = self._closer_ids() if self._opened(tail) else []
            return self._template.extend(tail, [*closed, output_ids[-1]], new_messages, options)
        if any(stop in output_ids for stop in self._stops):
            return None
        return self._template.extend(tail, output_ids.tolist(), new_messages, options)

    def _from_template(
        self,
        tail: list[int],
        output_ids: Ids,
        answer: Message,
        new_messages: Sequence[Message],
        tools: Sequence[Tool],
        options: Options,
    ) -> list[int] | None:
        ends = self._ends(answer, new_messages, tools, options)
        if ends is None:
            return None
        last = output_ids[-1] if output_ids else None
        if last not in self._stops:
            opened = self._left_open(tail, output_ids)
            return (self._closer_ids() if opened else []) + ends.closing + ends.rest
        if ends.closes:
            return ends.rest
        # The family ends a turn by opening the next one: that opener is there already, if it is the right one.
        return ends.rest[1:] if ends.rest[:1] == [last] else ends.closing + ends.rest

    def _ends(
        self, answer: Message, new_messages: Sequence[Message], tools: Sequence[Tool], options: Options
    ) -> _Ends | None:
        history = [Message(Role.USER, _USER), _synthetic(answer)]
        some_tool = [_TOOL] if tools else []
        try:
            before = self._template.render(history, some_tool, options, prompt=False)
            after = self._template.render([*history, *new_messages], some_tool, options)
        except InvalidRequest:
            # Rendering the whole conversation decides whether it can be expressed at all.
            return None
        return self._split(before, after, calls=bool(answer.tool_calls))

    def _split(self, before: list[int], after: list[int], *, calls: bool) -> _Ends | None:
        """Prove that `after` goes on where `before` ended. Reasoning markers in the answer itself may differ."""
        limit = len(before) + TAIL
        answered, times = self._find(before, _ANSWER, len(before)), self._count(before, _ANSWER)
        asked = self._find(before, _USER, len(before), 1)
        goes_on = self._find(after, _ANSWER, limit, times)
        if answered is None or goes_on is None or asked is None or before[:asked] != after[:asked]:
            return None
        close = next((at for at in range(answered, len(before)) if before[at] in self._stops), None)
        fixed = before[answered:] if close is None else before[answered : close + 1]
        if after[goes_on : goes_on + len(fixed)] != fixed:
            return None
        # After calls, what is fixed begins with the rest of the synthetic ones: only the end token is of use.
        closing = fixed if not calls else fixed[-1:] if close is not None else []
        return _Ends(closing, after[goes_on + len(fixed) :], closes=close is not None)

    def _find(self, ids: Sequence[int], text: str, limit: int, times: int | None = None) -> int | None:
        """Index after the token that completes the given (default: last) occurrence of `text`."""
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

    def _count(self, ids: Sequence[int], text: str) -> int:
        return b"".join(map(self._tokenizer.piece, ids)).count(text.encode())

    def _left_open(self, tail: Sequence[int], output_ids: Ids) -> bool:
        """Whether the output ends inside reasoning. A call closes it, as the parser reads it."""
        if self._reasoning is None:
            return False
        text = self._tokenizer.decode(output_ids)
        if self._reasoning.closer in text or (self._tool_format is not None and self._tool_format.opener in text):
            return False
        return self._opened(tail) or text.lstrip().startswith(self._reasoning.opener)

    def _opened(self, header: Sequence[int]) -> bool:
        if self._reasoning is None:
            return False
        text = self._tokenizer.decode(header)
        return text.rfind(self._reasoning.opener) > text.rfind(self._reasoning.closer)

    def _closer_ids(self) -> list[int]:
        return self._tokenizer.encode(self._reasoning.closer) if self._reasoning is not None else []


def _synthetic(answer: Message) -> Message:
    """An answer of the same kind, short: its calls keep ids and names, which tool results refer to."""
    calls = tuple(ToolCall(call.id, call.name, f'{{"text": "{_ANSWER}"}}') for call in answer.tool_calls)
    return Message(Role.ASSISTANT, _ANSWER, calls)


def _token_at(pieces: Sequence[bytes], end: int) -> int:
    length = 0
    for index, piece in enumerate(pieces):
        length += len(piece)
        if length >= end:
            return index + 1
    return len(pieces)
