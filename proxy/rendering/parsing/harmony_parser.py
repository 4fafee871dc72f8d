"""gpt-oss: an answer is a sequence of messages, each with a header that says its channel and its recipient.

`analysis` is reasoning, `commentary` to a function a call, all else text. The prompt ends inside of the first header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from proxy.engine.grammar import GrammarPart
from proxy.rendering.parsing.lexer import Lexeme, Lexer, Mark
from proxy.rendering.parsing.output_parser import OutputParser, State
from proxy.rendering.tool_calls.json_calls import ArgumentsReader
from proxy.rendering.tool_calls.tool_format import CallReader, CallSink, Malformed, ToolFormat, plausible, schema_of
from proxy.types import Tool

_MESSAGE, _START = "<|message|>", "<|start|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")

HARMONY_MARKS = (_START, "<|channel|>", "<|constrain|>", _MESSAGE, *_ENDS)

_RECIPIENT = "to="


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """`to=functions.NAME` in a header, the arguments as the message, ended by `<|call|>`."""

    name: str = "gpt-oss"
    opener: str = "to=functions."
    closer: str = "<|call|>"
    bare: str = ""
    separator: str | None = None
    marks: tuple[str, ...] = HARMONY_MARKS

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return _HarmonyReader(sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        begin = f"<|channel|>commentary to=functions.{tool.name} <|constrain|>json<|message|>"
        # `<|call|>` is an end token: it follows by itself.
        return (GrammarPart(text=begin), GrammarPart(schema=schema_of(tool)))


class _HarmonyReader:
    """From the name on: the rest of the header, then the arguments."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._head = ""
        self._arguments: ArgumentsReader | None = None
        self.done = False
        self.idle = False

    def take(self, text: str, mark: bool) -> None:
        if self._arguments is None:
            self._in_head(text, mark)
        elif mark and text in _ENDS:
            if not self._arguments.complete:
                raise Malformed
            self.done = True
            self._sink.end("")
        else:
            at = 0 if self._arguments.complete else self._arguments.push(text)
            if text[at:].strip():
                raise Malformed

    def _in_head(self, text: str, mark: bool) -> None:
        if not mark:
            self._head += text
        elif text != _MESSAGE:
            self._head += " "
        else:
            name = self._head.split()[0] if self._head.split() else ""
            if not plausible(name):
                raise Malformed
            self._arguments = ArgumentsReader(name, self._sink)


class HarmonyParser(OutputParser):
    """The same machine with channels. `reasoning_open`: the prompt began an analysis message."""

    def __init__(
        self,
        lexer: Lexer,
        tool_format: ToolFormat | None,
        *,
        reasoning_open: bool,
        stop: Sequence[str],
        call_id: Callable[[], str],
        tools: Sequence[Tool] = (),
    ) -> None:
        super().__init__(lexer, tool_format, reasoning_open=False, stop=stop, call_id=call_id, tools=tools)
        self._channel = "analysis" if reasoning_open else "header"
        self._header: list[Lexeme] = []
        self._first = not reasoning_open
        lexer.inside = True

    def _look_inside(self) -> None:
        self._lexer.inside = True

    def _step(self, lexeme: Lexeme) -> None:
        mark = lexeme.text if lexeme.mark in (Mark.INNER, Mark.END) else ""
        if lexeme.mark is Mark.END:
            self._close_message(lexeme)
            self._end(lexeme.position)
        elif self._channel == "header":
            self._in_header(lexeme, mark)
        elif mark in _ENDS:
            self._close_message(lexeme)
            self._channel = "between"
        elif mark == _START:
            self._resolve_held()
            self._channel, self._header = "header", [lexeme]
        else:
            self._in_message(lexeme)

    def _in_header(self, lexeme: Lexeme, mark: str) -> None:
        self._header.append(lexeme)
        if mark == _MESSAGE:
            self._begin_message("".join(part.text for part in self._header))
        elif mark:
            self._first = False
        elif self._first and not self._may_be_header():
            # The model answers without any header: what it says is text.
            header, self._header = self._header, []
            self._channel, self._first = "final", False
            self._show(header)

    def _may_be_header(self) -> bool:
        text = "".join(part.text for part in self._header).strip()
        return text.startswith(_RECIPIENT) or _RECIPIENT.startswith(text)

    def _begin_message(self, header: str) -> None:
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"to=functions\.([^\s<]*)", header)
        lexemes, self._header, self._first = self._header, [], False
        if recipient is not None and self._format is not None:
            self._channel = "call"
            self._open_region(lexemes[0])
            self._held = lexemes
            self._read(recipient[1], mark=False)
            self._read_more(_MESSAGE)
        elif channel is not None and channel[1] == "analysis":
            self._channel = "analysis"
            self.reasoning_tokens += sum(part.tokens for part in lexemes)
        else:
            self._channel = "final"

    def _in_message(self, lexeme: Lexeme) -> None:
        if self._channel == "analysis":
            self.reasoning_tokens += lexeme.tokens
            self._built.reasoning(lexeme.text)
        elif self._channel == "final":
            self._push_content(lexeme)
        elif self._channel == "call" and self._state is State.CALL:
            self._held.append(lexeme)
            self._read(lexeme.text, mark=False)
        elif self._channel == "call" and self._state is State.BROKEN:
            self._show([lexeme])

    def _close_message(self, lexeme: Lexeme) -> None:
        if self._channel == "analysis":
            self.reasoning_tokens += lexeme.tokens
        elif self._channel == "call":
            self._read_more(_ENDS[1])
            self._resolve_held()
            if self._state is not State.DONE:
                self._state = State.CONTENT
        elif self._channel == "header":
            self._header = []

    def _read_more(self, mark: str) -> None:
        if self._state is State.CALL:
            self._read(mark, mark=True)
