"""Parses sampled ids into an assistant message. The joined deltas give the message, for any division of the ids.

- Reasoning can only open an answer.
- A tool call is streamed once its name and the beginning of its arguments are certain. If it turns out malformed
  before that, it becomes text; after that, it stays a call with the arguments read so far, because the client has
  already seen it. `malformed_calls` counts both.
- A call inside reasoning is part of the reasoning. Only if the reasoning is never closed does its first call close it
  (as in the `renderers` package, the reference of the tests).
- Text after a well-formed call is not part of the message, as in vLLM, SGLang and `renderers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto

from proxy.rendering.deltas import Delta
from proxy.rendering.parsing.lexer import Lexeme, Lexer, Mark
from proxy.rendering.parsing.message_builder import NOTHING, MessageBuilder, RegionSink
from proxy.rendering.tool_calls.tool_format import CallReader, Malformed, ToolFormat
from proxy.types import Message, Tool


class State(Enum):
    """The position of the parser in the output."""

    START = auto()  # only white space so far: reasoning may still begin
    REASONING = auto()
    DRAFT = auto()  # a call inside open reasoning: undecided until the reasoning is closed or the output ends
    CONTENT = auto()
    CALL = auto()
    BROKEN = auto()  # after a malformed call that was not streamed: text up to the closing marker
    CUT = auto()  # after a malformed call that was partly streamed: everything up to the closing marker is dropped
    DONE = auto()


class OutputParser:
    """Incremental parser of one output. Feed sampled ids in order, then call `finish`; `message` is then complete.

    `reasoning_open`: the prompt opened the reasoning. `tool_format` None: tool calls stay text. `label`: text after the
    reasoning's opening marker that is not reasoning. `tools`: their schemas give the types of arguments.
    `reasoning_tokens`: the number of tokens in the reasoning, markers included. `stop_string`: the stop string that
    ended the output, if one did; none does before `stop_after` tokens. `begun`: the beginning of the message, which the
    prompt contains; the output continues its text. `strip`: drop white space around the visible text.
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
        begun: Message | None = None,
        strip: bool = True,
    ) -> None:
        self._lexer = lexer
        self._format = tool_format
        self._tools = tools
        self._state = State.REASONING if reasoning_open else State.START if begun is None else State.CONTENT
        self._label = "" if reasoning_open else label
        self._fresh = begun is None  # no visible text yet, so a call without an opening marker may begin
        self._bare = False  # the current region began without an opening marker
        self._built = MessageBuilder(stop, call_id, begun or NOTHING, strip=strip)
        self._region: RegionSink | None = None
        self._reader: CallReader | None = None
        self._held: list[Lexeme] = []
        self._finished = False
        self._ended_at: int | None = None
        self.malformed_calls = 0
        self.reasoning_tokens = 0
        self.stop_string: str | None = None
        self.stop_after = 0

    @property
    def message(self) -> Message:
        """The message parsed so far."""
        return self._built.message(self._region.unfinished() if self._region is not None else ())

    @property
    def kept(self) -> int:
        """The number of tokens up to and including the end of the output (stop string or end token), or all."""
        return self._lexer.position if self._ended_at is None else self._ended_at

    def keep_stop_string(self) -> None:
        """Let the visible text include the stop string that ends the output; it is left out by default."""
        self._built.keep_stop_string()

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Return the deltas that these tokens add. Tokens after an end token or a complete stop string are ignored."""
        self._built.deltas = []
        if self._state is not State.DONE:
            text = self._lexer.run(ids)
            if text is not None:
                self._run(text, len(ids))
            else:
                self._take(self._lexer.feed(ids))
        return self._built.deltas

    def feed_text(self, ids: Sequence[int]) -> list[Delta] | None:
        """Feed `ids` if they are text in the middle of the reasoning or of the visible text, else return None.

        The result is the same as for ids fed one by one: only the last id may end the output.
        """
        if self._state is State.REASONING or (self._state is State.CONTENT and not self._fresh):
            text = self._lexer.run(ids)
            if text is not None:
                self._built.deltas = []
                self._run(text, len(ids))
                return self._built.deltas
        return None

    def finish(self) -> list[Delta]:
        """End the output and return the last deltas: incomplete markers and characters, and unfinished calls."""
        self._built.deltas = []
        if not self._finished:
            self._finished = True
            if self._state is not State.DONE and (rest := list(self._lexer.flush())):
                self._take(rest)
            if self._held or self._state is State.DRAFT or self._state is State.CALL:
                self._resolve_held()
            self._built.flush()
        return self._built.deltas

    def _run(self, text: str, tokens: int) -> None:
        """Take a run of text, like `_take` but faster in the two states in which most of an output is read."""
        if self._fresh and (self._state is State.START or self._state is State.CONTENT):
            first = text.lstrip()[:1]
            if first and (self._format is None or first not in self._format.bare):
                self._state, self._fresh = State.CONTENT, False
        if self._state is State.REASONING:
            self.reasoning_tokens += tokens
            self._built.reasoning(text)
        elif self._state is State.CONTENT and not self._fresh and not self._built.called:
            self.stop_string = self._built.text(text, may_stop=self._lexer.position >= self.stop_after)
            if self.stop_string is not None:
                self._end(self._lexer.position)
        else:
            self._take((Lexeme(text, None, self._lexer.position, tokens),))

    def _take(self, lexemes: Iterable[Lexeme]) -> None:
        for lexeme in lexemes:
            self._step(lexeme)
            if self._state is State.DONE:
                return
            self._look_inside()

    def _look_inside(self) -> None:
        """Let the lexer search for the marks of calls only while inside calls."""
        state = self._state
        self._lexer.inside = state is State.CALL or state is State.DRAFT

    def _step(self, lexeme: Lexeme) -> None:
        if lexeme.mark is Mark.END:
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
        elif lexeme.mark not in (Mark.THINK_OPEN, Mark.HIDDEN):  # a second opening marker has no meaning
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
        """Begin a region of calls after an opening marker or, without a marker, with `text`."""
        assert self._format is not None
        self._bare = bool(text)
        self._fresh = False
        self._state = State.CALL
        self._held = [lexeme]
        names = frozenset(tool.name for tool in self._tools) if self._bare and self._tools else None
        self._region = RegionSink(self._built, names)
        self._reader = self._format.reader(self._tools, self._region)
        if text:
            self._read(text, mark=False)

    def _in_call(self, lexeme: Lexeme) -> None:
        self._held.append(lexeme)
        self._read(lexeme.text, mark=lexeme.mark in (Mark.INNER, Mark.CALL_CLOSE))

    def _read(self, text: str, *, mark: bool) -> None:
        region = self._region
        assert self._reader is not None and region is not None
        try:
            self._reader.take(text, mark)
        except Malformed:
            self._break()
            return
        if region.rest is not None:
            # Completed calls have been streamed; only the text after them can still turn out not to be a call.
            last = self._held[-1]
            self._held = [Lexeme(region.rest, None, last.position, 0)] if region.rest else []
            region.rest = None
        if self._reader.done:
            self._state = State.CONTENT
            self._held = []

    def _break(self) -> None:
        """Abandon the region of calls: it is malformed from here on."""
        held, self._held = self._held, []
        region = self._region
        assert region is not None
        over = self._bare or bool(held and held[-1].mark is Mark.CALL_CLOSE)
        if region.rest is not None:
            held = [Lexeme(region.rest, None, held[-1].position, 0)]
            region.rest = None
        # Without an opening marker, it was not meant as a call: an answer may begin with a bracket.
        self.malformed_calls += region.open or not self._bare
        if region.open:
            region.cut()
            self._state = State.CONTENT if over else State.CUT
        else:
            self._state = State.CONTENT if over else State.BROKEN
            if not (self._bare and self._built.called):  # else it is text after a call
                self._show(held)

    def _in_rest(self, lexeme: Lexeme) -> None:
        """Handle the text after malformed calls. A region without a closing marker lasts until the next opening one."""
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
        """Decide held lexemes at the end: a draft in unclosed reasoning is a call, an unfinished call is text."""
        held, self._held = self._held, []
        if self._state is State.DRAFT:
            self._state = State.CONTENT
            self._built.end_label()
            self._take(held)
            self._resolve_held()
        elif self._state is State.CALL:
            self._held = held
            region = self._region
            if self._reader is not None and self._reader.idle and region is not None and not region.open:
                self._held, self._state = [], State.CONTENT
            else:
                self._break()

    def _show(self, held: Sequence[Lexeme]) -> None:
        for part in held:
            if self._state is not State.DONE:
                self._push_content(part)

    def _push_content(self, lexeme: Lexeme) -> None:
        self.stop_string = self._built.text(lexeme.text, may_stop=lexeme.position >= self.stop_after)
        if self.stop_string is not None:
            self._end(lexeme.position)

    def _end(self, position: int) -> None:
        if self._ended_at is None:
            self._ended_at = position
        self._state = State.DONE
