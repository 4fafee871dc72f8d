"""One state machine over sampled ids: the deltas joined are the message, however the ids were cut into chunks.

Reasoning only opens an answer. A call goes out as it is sampled, from where its name and the beginning of its
arguments are certain. What breaks before that stays visible as text; what breaks after it stays a call with the
arguments that were read, since a client has seen it. Both are counted. A call drafted inside reasoning is reasoning;
only where the reasoning is never closed does the first call close it (as the `renderers` package reads it, which is
the oracle in tests). Text after a well-formed call is not part of the message, as in vLLM, SGLang and `renderers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from proxy.rendering.deltas import Delta
from proxy.rendering.parsing.lexer import Lexeme, Lexer, Mark
from proxy.rendering.parsing.message_builder import MessageBuilder
from proxy.rendering.tool_calls.tool_format import CallReader, Malformed, ToolFormat
from proxy.types import Message, Tool


class State(Enum):
    START = auto()  # only white space so far: reasoning may still open
    REASONING = auto()
    DRAFT = auto()  # a call marker inside open reasoning: undecided until the reasoning is closed or the output ends
    CONTENT = auto()
    CALL = auto()
    BROKEN = auto()  # inside of a region of calls that cannot be read: text up to its closer
    CUT = auto()  # the same after a call of which the client has seen the beginning: nothing up to the closer
    DONE = auto()


class OutputParser:
    """Feed sampled ids in order, then `finish` once; `message` is complete after that.

    `kept`: tokens fed up to and with the one that ended the parse (a stop string or an end token), else all of them.
    `reasoning_tokens`: tokens of the reasoning, its markers included. `tool_format` None: calls are text. `label`: text
    after the opener of reasoning that is none. `tools` type the arguments.
    """

    def __init__(
        self,
        lexer: Lexer,
        tool_format: ToolFormat | None,
        *,
        reasoning_open: bool,
        stop: Sequence[str],
        call_id: Callable[[], str],
        tools: Sequence[Tool] = (),
        label: str = "",
    ) -> None:
        self._lexer = lexer
        self._format = tool_format
        self._tools = tools
        self._state = State.REASONING if reasoning_open else State.START
        self._label = "" if reasoning_open else label
        self._fresh = True  # no visible text yet: a call without a marker may begin
        self._bare = False  # the region began without a marker
        self._built = MessageBuilder(stop, call_id)
        self._reader: CallReader | None = None
        self._held: list[Lexeme] = []
        self._finished = False
        self._ended_at: int | None = None
        self.malformed_calls = 0
        self.reasoning_tokens = 0

    @property
    def message(self) -> Message:
        return self._built.message

    @property
    def stop_string(self) -> str | None:
        return self._built.stop_string

    @property
    def kept(self) -> int:
        return self._lexer.position if self._ended_at is None else self._ended_at

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """What these tokens add. Everything after an end token or a complete stop string is ignored."""
        if self._state is not State.DONE:
            self._take(self._lexer.feed(ids))
        return self._built.give()

    def finish(self) -> list[Delta]:
        """What was held back: an incomplete marker or character, an unfinished call."""
        if not self._finished:
            self._finished = True
            if self._state is not State.DONE:
                self._take(self._lexer.flush())
            self._resolve_held()
            self._built.flush()
        return self._built.give()

    def _take(self, lexemes: Iterable[Lexeme]) -> None:
        for lexeme in lexemes:
            self._step(lexeme)
            if self._state is State.DONE:
                return
            self._look_inside()

    def _look_inside(self) -> None:
        """The marks inside of calls are only looked for there."""
        state = self._state
        self._lexer.inside = state is State.CALL or state is State.DRAFT

    def _step(self, lexeme: Lexeme) -> None:
        if lexeme.mark is None and not self._fresh and self._state is State.CONTENT:
            if not self._built.called:
                self._push_content(lexeme)
        elif lexeme.mark is Mark.END:
            self._resolve_held()
            self._end(lexeme.position)
        elif self._state is State.CALL:
            self._in_call(lexeme)
        elif self._state in (State.BROKEN, State.CUT):
            self._in_rest(lexeme)
        elif self._state is State.DRAFT:
            self._in_draft(lexeme)
        elif self._state is State.REASONING:
            self._in_reasoning(lexeme)
        else:
            self._in_content(lexeme)

    def _in_reasoning(self, lexeme: Lexeme) -> None:
        if lexeme.mark is Mark.CALL_OPEN:
            self._state = State.DRAFT
            self._held = [lexeme]
            return
        self.reasoning_tokens += lexeme.tokens
        if lexeme.mark is Mark.THINK_CLOSE:
            self._built.end_label()
            self._state = State.CONTENT
        elif lexeme.mark not in (Mark.THINK_OPEN, Mark.HIDDEN):  # a second opener says nothing
            self._built.reasoning(lexeme.text)

    def _in_draft(self, lexeme: Lexeme) -> None:
        self._held.append(lexeme)
        if lexeme.mark is Mark.THINK_CLOSE:
            held, self._held = self._held, []
            self._state = State.CONTENT
            self.reasoning_tokens += sum(part.tokens for part in held)
            self._built.end_label()
            self._built.reasoning("".join(part.text for part in held[:-1] if part.mark is not Mark.THINK_OPEN))

    def _in_content(self, lexeme: Lexeme) -> None:
        if lexeme.mark is Mark.CALL_OPEN:
            self._open_region(lexeme)
        elif lexeme.mark is Mark.THINK_OPEN and self._state is State.START:
            self._state = State.REASONING
            self.reasoning_tokens += lexeme.tokens
            self._built.begin_label(self._label)
        elif lexeme.mark is not Mark.HIDDEN:
            text = lexeme.text.lstrip() if self._fresh else ""
            if text and self._may_begin_call(text, lexeme):
                self._open_region(lexeme, text)
                return
            if lexeme.text.strip():
                self._state, self._fresh = State.CONTENT, False
            if not self._built.called:
                self._push_content(lexeme)

    def _may_begin_call(self, text: str, lexeme: Lexeme) -> bool:
        return lexeme.mark is None and self._format is not None and text[0] in self._format.bare

    def _open_region(self, lexeme: Lexeme, text: str = "") -> None:
        """Calls begin: after a marker, or with `text` where there is none."""
        assert self._format is not None
        self._bare = bool(text)
        self._fresh = False
        self._state = State.CALL
        self._held = [lexeme]
        names = frozenset(tool.name for tool in self._tools) if self._bare else None
        self._reader = self._format.reader(self._tools, self._built.region(names))
        if text:
            self._read(text, mark=False)

    def _in_call(self, lexeme: Lexeme) -> None:
        self._held.append(lexeme)
        self._read(lexeme.text, mark=lexeme.mark in (Mark.INNER, Mark.CALL_CLOSE))

    def _read(self, text: str, *, mark: bool) -> None:
        assert self._reader is not None
        region = self._built.sink
        try:
            self._reader.take(text, mark)
        except Malformed:
            self._break()
            return
        if region.rest is not None:
            # The calls that were closed are out; only what came after them can still turn out to be text.
            last = self._held[-1]
            self._held = [Lexeme(region.rest, None, last.position, 0)] if region.rest else []
            region.rest = None
        if self._reader.done:
            self._state = State.CONTENT
            self._held = []

    def _break(self) -> None:
        """The region cannot be read from here on."""
        held, self._held = self._held, []
        region = self._built.sink
        over = self._bare or bool(held and held[-1].mark is Mark.CALL_CLOSE)
        if region.rest is not None:
            held = [Lexeme(region.rest, None, held[-1].position, 0)]
            region.rest = None
        # Without a marker it was no attempt at a call: an answer may well begin with a bracket.
        self.malformed_calls += region.open or not self._bare
        if region.open:
            region.cut()
            self._state = State.CONTENT if over else State.CUT
        else:
            self._state = State.CONTENT if over else State.BROKEN
            self._show(held)

    def _in_rest(self, lexeme: Lexeme) -> None:
        """What follows a break. A region that has no closer lasts until the next opener."""
        assert self._format is not None
        if lexeme.mark is Mark.CALL_OPEN and not self._format.closer:
            self._open_region(lexeme)
            return
        broken = self._state is State.BROKEN
        if lexeme.mark is Mark.CALL_CLOSE:
            self._state = State.CONTENT
        if broken:
            self._show([lexeme])

    def _resolve_held(self) -> None:
        """The output is over: a draft in reasoning that was never closed is a call, an unfinished call is text."""
        held, self._held = self._held, []
        if self._state is State.DRAFT:
            self._state = State.CONTENT
            self._built.end_label()
            self._take(held)
            self._resolve_held()
        elif self._state is State.CALL:
            self._held = held
            if self._reader is not None and self._reader.idle and not self._built.sink.open:
                self._held, self._state = [], State.CONTENT
            else:
                self._break()

    def _show(self, held: Sequence[Lexeme]) -> None:
        for part in held:
            if self._state is not State.DONE:
                self._push_content(part)

    def _push_content(self, lexeme: Lexeme) -> None:
        self._built.text(lexeme.text)
        if self._built.stop_string is not None:
            self._end(lexeme.position)

    def _end(self, position: int) -> None:
        if self._ended_at is None:
            self._ended_at = position
        self._state = State.DONE
