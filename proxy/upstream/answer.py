"""An answer of an external model, as it arrives: deltas in an order that every API can write, then the message.

Some APIs may send the pieces of several tool calls in turns. Here, the pieces of a call are never interrupted: what
arrives while a call is open is held back until the call has ended.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import jiter
import orjson

from proxy.protocols.wire_protocol import new_hex
from proxy.rendering.deltas import Delta, ReasoningDelta, TextDelta, ToolCallArguments, ToolCallEnd, ToolCallStart
from proxy.types import Message, Role, ToolCall
from proxy.upstream.failure import Failure
from tokengrove.reasons import FinishReason


class UpstreamUsage(NamedTuple):
    """Token counts as the external model tells them; None: it does not. `cached_tokens` are part of the prompt,
    `reasoning_tokens` part of the completion."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None


class UpstreamAnswer(NamedTuple):
    """A complete answer.

    `message`: the joined deltas, without a prefill; calls have the ids that the external model gave them. A call that
    `finish` LENGTH or CONTENT_FILTER cut off has the arguments so far. `model`: what answered, in the external model's
    own words. `stop_string`: the one that ended it, if the API tells.
    """

    message: Message
    finish: FinishReason
    usage: UpstreamUsage
    model: str
    stop_string: str | None = None


@dataclass(slots=True, eq=False)
class Part:
    """A run of text or of reasoning, or a tool call. `told`: the number of its pieces that are among the deltas.

    `ended`: of a call: that its API has said so; None: its API never does, and its arguments tell.
    """

    kind: type[TextDelta] | type[ReasoningDelta] | type[ToolCallStart]
    pieces: list[str] = field(default_factory=list)
    told: int = 0
    index: int = 0
    call_id: str = ""
    name: str = ""
    ended: bool | None = None
    begun: bool = False
    over: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class AnswerParts:
    """Collects an answer: readers write to it, and the client takes the deltas."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._open: deque[Part] = deque()
        self._deltas: list[Delta] = []
        self._calls = 0

    def text(self, text: str) -> None:
        """Add a piece of the visible answer."""
        self._run(TextDelta, text)

    def reasoning(self, text: str) -> None:
        """Add a piece of the reasoning."""
        self._run(ReasoningDelta, text)

    def begin_call(self, call_id: str, name: str, *, told: bool) -> Part:
        """Begin a tool call. `told`: its API tells its end. Raises Failure without a name."""
        if not name:
            raise Failure("the external model calls a tool without a name")
        call = Part(ToolCallStart, ended=False if told else None)
        call.index, call.call_id, call.name = self._calls, call_id or f"call_{new_hex()}", name
        self._calls += 1
        self._add(call)
        return call

    def arguments(self, call: Part, fragment: str) -> None:
        """Add a piece of a call's arguments. Raises Failure if the call has ended."""
        if fragment:
            if call.over or call.ended:
                raise Failure("the external model continues a tool call that it had ended")
            self._write(call, fragment)

    def end_call(self, call: Part) -> None:
        """End a call. Nothing happens if it has ended."""
        if call.ended:
            return
        if not call.pieces:
            self._write(call, "{}")
        call.ended = True
        self._advance()

    def take(self) -> list[Delta]:
        """The deltas since the last call."""
        deltas, self._deltas = self._deltas, []
        return deltas

    def message(self, finish: FinishReason) -> tuple[Message, FinishReason]:
        """End the answer: its message, and why it ended. Raises Failure if a call never ends, or if there is none."""
        cut = finish in (FinishReason.LENGTH, FinishReason.CONTENT_FILTER)
        while self._open:
            part = self._open[0]
            self._tell(part)
            if part.kind is ToolCallStart:
                self._close(part, cut=cut)
            self._open.popleft()
        if not cut and any(p.kind is ToolCallStart and _is_cut(p.text) for p in self._parts):
            raise Failure("the external model never ends the arguments of a tool call")
        if finish is FinishReason.TOOL_CALLS and not self._calls:
            raise Failure("the external model ends its answer for tool calls, but calls no tool")
        if finish is FinishReason.STOP and self._calls:
            finish = FinishReason.TOOL_CALLS
        texts = {kind: "".join(p.text for p in self._parts if p.kind is kind) for kind in (TextDelta, ReasoningDelta)}
        calls = [ToolCall(p.call_id, p.name, p.text) for p in self._parts if p.kind is ToolCallStart]
        return Message(
            Role.ASSISTANT, texts[TextDelta], tool_calls=tuple(calls), reasoning=texts[ReasoningDelta] or None
        ), finish

    def _run(self, kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
        if text:
            if not self._parts or self._parts[-1].kind is not kind:
                self._add(Part(kind))
            self._write(self._parts[-1], text)

    def _add(self, part: Part) -> None:
        self._parts.append(part)
        self._open.append(part)
        head = self._open[0]
        if head.ended is None and head.kind is ToolCallStart and len(self._open) == 2 and _is_json(head.text):
            head.ended = True  # looked at once: what follows a call with unfinished arguments waits for the end
        self._advance()

    def _write(self, part: Part, text: str) -> None:
        part.pieces.append(text)
        if part is self._open[0]:
            self._tell(part)

    def _advance(self) -> None:
        """End the first parts that have ended, and tell what was held back because of them."""
        while self._open:
            head = self._open[0]
            self._tell(head)
            if head.kind is ToolCallStart:
                if not head.ended:
                    return
                self._close(head, cut=False)
            elif len(self._open) == 1:
                return
            self._open.popleft()

    def _tell(self, part: Part) -> None:
        """Make deltas of what was not told of a part."""
        if part.kind is ToolCallStart and not part.begun:
            part.begun = True
            self._deltas.append(ToolCallStart(part.index, part.call_id, part.name))
        for piece in part.pieces[part.told :]:
            if part.kind is ToolCallStart:
                self._deltas.append(ToolCallArguments(part.index, piece))
            else:
                self._deltas.append(TextDelta(piece) if part.kind is TextDelta else ReasoningDelta(piece))
        part.told = len(part.pieces)

    def _close(self, call: Part, *, cut: bool) -> None:
        """Tell the end of a call. `cut`: the answer was cut off, so the call may lack its end."""
        if not call.pieces and call.ended is None and not cut:
            self._write(call, "{}")
        unfinished = call.ended is False or (call.ended is None and _is_cut(call.text))
        if call.ended is False and not cut:
            raise Failure("the external model never ends a tool call")
        call.over = True
        if not unfinished:
            self._deltas.append(ToolCallEnd(call.index))


def _is_json(text: str) -> bool:
    try:
        orjson.loads(text)
    except orjson.JSONDecodeError:
        return False
    return True


def _is_cut(text: str) -> bool:
    """Whether a text is only the beginning of JSON. Other text that is no JSON is a mistake of the model."""
    if _is_json(text):
        return False
    try:
        jiter.from_json(text.encode(errors="replace"), partial_mode="trailing-strings")
    except ValueError:
        return not text.strip()
    return True
