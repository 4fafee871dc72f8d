"""Builds output parsers for a tool-call format and a reasoning format. Their marks are looked up once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.rendering.parsing.harmony_parser import HarmonyParser
from proxy.rendering.parsing.lexer import Lexer, Mark, Marks
from proxy.rendering.parsing.message_builder import NOTHING
from proxy.rendering.parsing.output_parser import OutputParser
from proxy.rendering.reasoning_formats import ReasoningFormat
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.harmony_calls import HARMONY_MARKS, HarmonyFormat
from proxy.rendering.tool_calls.tool_format import ToolFormat
from proxy.types import Message, Tool


class ParserFactory:
    """Builds the output parsers for one vocabulary. With `calls` None, tool calls stay text."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_token_ids: Sequence[int],
        reasoning: ReasoningFormat | None,
        calls: ToolFormat | None,
    ) -> None:
        self._tokenizer, self._calls = tokenizer, calls
        self._label = reasoning.label if reasoning is not None else ""
        self._harmony = isinstance(calls, HarmonyFormat) or (reasoning is not None and reasoning.channels)
        if self._harmony:
            self._marks = Marks(tokenizer, {}, stop_token_ids, HARMONY_MARKS)
        else:
            inner = calls.marks if calls is not None else ()
            self._marks = Marks(tokenizer, _spellings(reasoning, calls), stop_token_ids, inner)
        self._ends = Marks(tokenizer, {}, stop_token_ids, ())

    def build(
        self,
        *,
        tools: Sequence[Tool],
        reasoning_open: bool,
        stop: Sequence[str],
        call_id: Callable[[], str],
        begun: Message | None = None,
    ) -> OutputParser:
        """Return the parser of one output. `reasoning_open`: whether the prompt opened the reasoning. `begun`: the
        beginning of the message, which the prompt contains."""
        lexer, calls = Lexer(self._tokenizer, self._marks, stop), self._calls
        if self._harmony:
            known = calls if isinstance(calls, HarmonyFormat) else None
            return HarmonyParser(
                lexer, known, reasoning_open=reasoning_open, stop=stop, call_id=call_id, tools=tools, begun=begun
            )
        return OutputParser(
            lexer,
            calls,
            reasoning_open=reasoning_open,
            stop=stop,
            call_id=call_id,
            tools=tools,
            label=self._label,
            begun=begun,
        )

    def plain(self, stop: Sequence[str]) -> OutputParser:
        """Return the parser of an output that is not a chat message: its unchanged text, without end tokens."""
        lexer = Lexer(self._tokenizer, self._ends, stop)
        return OutputParser(lexer, None, reasoning_open=False, stop=stop, call_id=str, begun=NOTHING, strip=False)


def _spellings(reasoning: ReasoningFormat | None, calls: ToolFormat | None) -> dict[str, Mark]:
    found: dict[str, Mark] = {}
    if reasoning is not None:
        found |= {reasoning.opener: Mark.THINK_OPEN, reasoning.closer: Mark.THINK_CLOSE}
        found |= dict.fromkeys(reasoning.hidden, Mark.HIDDEN)
    if calls is not None:
        found |= {calls.opener: Mark.CALL_OPEN, calls.closer: Mark.CALL_CLOSE}
    return found
