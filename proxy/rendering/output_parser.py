"""One state machine over sampled ids: the deltas joined are the message, however the ids were cut into chunks.

Reasoning only opens an answer. A call is emitted when it is closed and well formed; anything else between call
markers stays visible as text and is counted. A call drafted inside reasoning is reasoning; only where the reasoning
is never closed does the first call close it (as the `renderers` package reads it, which is the oracle in tests).
Text after a well-formed call is not part of the message, as in vLLM, SGLang and `renderers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from proxy.rendering.lexer import Lexeme, Lexer, Mark
from proxy.rendering.tool_formats import ToolFormat
from proxy.rendering.visible_text import VisibleText
from proxy.types import (
    Delta,
    Message,
    ReasoningDelta,
    Role,
    TextDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallEnd,
    ToolCallStart,
)


class _State(Enum):
    START = auto()  # only white space so far: reasoning may still open
    REASONING = auto()
    DRAFT = auto()  # a call marker inside open reasoning: undecided until the reasoning is closed or the output ends
    CONTENT = auto()
    CALL = auto()
    DONE = auto()


class OutputParser:
    """Feed sampled ids in order, then `finish` once; `message` is complete after that.

    `kept`: tokens fed up to and with the one that ended the parse (a stop string or an end token), else all of them.
    `reasoning_tokens`: tokens of the reasoning, its markers included. `tool_format` None: calls are text.
    """

    def __init__(
        self,
        lexer: Lexer,
        tool_format: ToolFormat | None,
        *,
        reasoning_open: bool,
        stop: Sequence[str],
        call_id: Callable[[], str],
    ) -> None:
        self._lexer = lexer
        self._format = tool_format
        self._call_id = call_id
        self._state = _State.REASONING if reasoning_open else _State.START
        self._content = VisibleText(stop)
        self._reasoning = VisibleText()
        self._held: list[Lexeme] = []
        self._calls: list[ToolCall] = []
        self._out: list[Delta] = []
        self._finished = False
        self._ended_at: int | None = None
        self.malformed_calls = 0
        self.reasoning_tokens = 0

    @property
    def message(self) -> Message:
        return Message(
            role=Role.ASSISTANT,
            content=self._content.text,
            tool_calls=tuple(self._calls),
            reasoning=self._reasoning.text or None,
        )

    @property
    def stop_string(self) -> str | None:
        return self._content.stop_string

    @property
    def kept(self) -> int:
        return self._lexer.position if self._ended_at is None else self._ended_at

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """What these tokens add. Everything after an end token or a complete stop string is ignored."""
        if self._state is not _State.DONE:
            self._take(self._lexer.feed(ids))
        return self._give()

    def finish(self) -> list[Delta]:
        """What was held back: an incomplete marker or character, an unfinished call."""
        if not self._finished:
            self._finished = True
            if self._state is not _State.DONE:
                self._take(self._lexer.flush())
            self._resolve_held()
            self._show_text(self._content.flush())
        return self._give()

    def _give(self) -> list[Delta]:
        out, self._out = self._out, []
        return out

    def _take(self, lexemes: Iterable[Lexeme]) -> None:
        for lexeme in lexemes:
            self._step(lexeme)
            if self._state is _State.DONE:
                return

    def _step(self, lexeme: Lexeme) -> None:
        if lexeme.mark is Mark.END:
            self._resolve_held()
            self._end(lexeme.position)
        elif self._state in (_State.CALL, _State.DRAFT):
            self._hold(lexeme)
        elif self._state is _State.REASONING:
            self._in_reasoning(lexeme)
        else:
            self._in_content(lexeme)

    def _in_reasoning(self, lexeme: Lexeme) -> None:
        if lexeme.mark is Mark.CALL_OPEN:
            self._state = _State.DRAFT
            self._held = [lexeme]
            return
        self.reasoning_tokens += lexeme.tokens
        if lexeme.mark is Mark.THINK_CLOSE:
            self._state = _State.CONTENT
        elif lexeme.mark is not Mark.THINK_OPEN:  # a second opener says nothing
            self._show_reasoning(lexeme.text)

    def _in_content(self, lexeme: Lexeme) -> None:
        if lexeme.mark is Mark.CALL_OPEN:
            self._state = _State.CALL
            self._held = [lexeme]
        elif lexeme.mark is Mark.THINK_OPEN and self._state is _State.START:
            self._state = _State.REASONING
            self.reasoning_tokens += lexeme.tokens
        else:
            if lexeme.text.strip():
                self._state = _State.CONTENT
            if not self._calls:
                self._push_content(lexeme)

    def _hold(self, lexeme: Lexeme) -> None:
        self._held.append(lexeme)
        if self._state is _State.CALL and lexeme.mark is Mark.CALL_CLOSE:
            self._close_call()
        elif self._state is _State.DRAFT and lexeme.mark is Mark.THINK_CLOSE:
            held, self._held = self._held, []
            self._state = _State.CONTENT
            self.reasoning_tokens += sum(part.tokens for part in held)
            self._show_reasoning("".join(part.text for part in held[:-1] if part.mark is not Mark.THINK_OPEN))

    def _close_call(self) -> None:
        held, self._held = self._held, []
        self._state = _State.CONTENT
        text = "".join(part.text for part in held[1:-1])
        call = self._format.read(text) if self._format is not None else None
        if call is None:
            self._malformed(held)
        else:
            self._emit_call(*call)

    def _emit_call(self, name: str, arguments: str) -> None:
        index = len(self._calls)
        call = ToolCall(self._call_id(), name, arguments)
        self._calls.append(call)
        self._out += [
            ToolCallStart(index, call.id, name),
            ToolCallArguments(index, arguments),
            ToolCallEnd(index),
        ]

    def _malformed(self, held: Sequence[Lexeme]) -> None:
        self.malformed_calls += 1
        for part in held:
            self._push_content(part)

    def _resolve_held(self) -> None:
        """The output is over: a draft in reasoning that was never closed is a call, an unclosed call is text."""
        held, self._held = self._held, []
        if self._state is _State.DRAFT:
            self._state = _State.CONTENT
            self._take(held)
            self._resolve_held()
        elif self._state is _State.CALL:
            self._state = _State.CONTENT
            self._malformed(held)

    def _push_content(self, lexeme: Lexeme) -> None:
        self._show_text(self._content.push(lexeme.text))
        if self._content.stop_string is not None:
            self._end(lexeme.position)

    def _end(self, position: int) -> None:
        if self._ended_at is None:
            self._ended_at = position
        self._state = _State.DONE

    def _show_text(self, text: str) -> None:
        if text:
            self._out.append(TextDelta(text))

    def _show_reasoning(self, text: str) -> None:
        shown = self._reasoning.push(text)
        if shown:
            self._out.append(ReasoningDelta(shown))
