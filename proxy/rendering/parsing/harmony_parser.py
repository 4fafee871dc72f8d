"""Parses outputs of gpt-oss: a sequence of messages, each with a header that names its channel and recipient.

The channel `analysis` is reasoning, a message with a function as recipient is a tool call, everything else is text.
The prompt ends inside the first header.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from proxy.rendering.parsing.lexer import Lexeme, Lexer, Mark
from proxy.rendering.parsing.output_parser import OutputParser, State
from proxy.rendering.tool_calls.harmony_calls import HARMONY_ENDS, HARMONY_MESSAGE, HARMONY_START
from proxy.rendering.tool_calls.tool_format import ToolFormat
from proxy.types import Message, Tool

_RECIPIENT = "to="


class HarmonyParser(OutputParser):
    """The output parser for harmony's channels. `reasoning_open`: whether the prompt opened an analysis message."""

    def __init__(
        self,
        lexer: Lexer,
        tool_format: ToolFormat | None,
        *,
        reasoning_open: bool,
        stop: Sequence[str],
        call_id: Callable[[], str],
        tools: Sequence[Tool] = (),
        begun: Message | None = None,
    ) -> None:
        super().__init__(lexer, tool_format, reasoning_open=False, stop=stop, call_id=call_id, tools=tools, begun=begun)
        self._channel = "final" if begun is not None else "analysis" if reasoning_open else "header"
        self._header: list[Lexeme] = []
        self._first = self._channel == "header"
        lexer.inside = True

    def _run(self, text: str, tokens: int) -> None:
        self._step(Lexeme(text, None, self._lexer.position, tokens))

    def _look_inside(self) -> None:
        self._lexer.inside = True

    def _step(self, lexeme: Lexeme) -> None:
        mark = lexeme.text if lexeme.mark in (Mark.INNER, Mark.END) else ""
        if lexeme.mark is Mark.END:
            self._close_message(lexeme)
            self._end(lexeme.position)
        elif self._channel == "header":
            self._in_header(lexeme, mark)
        elif mark in HARMONY_ENDS:
            self._close_message(lexeme)
            self._channel = "between"
        elif mark == HARMONY_START:
            self._resolve_held()
            self._channel, self._header = "header", [lexeme]
        else:
            self._in_message(lexeme)

    def _in_header(self, lexeme: Lexeme, mark: str) -> None:
        self._header.append(lexeme)
        if mark == HARMONY_MESSAGE:
            self._begin_message("".join(part.text for part in self._header))
        elif mark:
            self._first = False
        elif self._first and not self._may_be_header():
            # The model answers without a header: everything is text.
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
            self._read_more(HARMONY_MESSAGE)
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
            self._read_more(HARMONY_ENDS[1])
            self._resolve_held()
            if self._state is not State.DONE:
                self._state = State.CONTENT
        elif self._channel == "header":
            self._header = []

    def _read_more(self, mark: str) -> None:
        if self._state is State.CALL:
            self._read(mark, mark=True)
