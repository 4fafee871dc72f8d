"""Builds the output parser for a tool-call format and a reasoning format."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.rendering.parsing.harmony_parser import HarmonyParser
from proxy.rendering.parsing.lexer import Lexer, Mark
from proxy.rendering.parsing.output_parser import OutputParser
from proxy.rendering.reasoning_formats import ReasoningFormat
from proxy.rendering.tokenizer import Tokenizer
from proxy.rendering.tool_calls.harmony_calls import HARMONY_MARKS, HarmonyFormat
from proxy.rendering.tool_calls.tool_format import ToolFormat
from proxy.types import Tool


def build_parser(
    tokenizer: Tokenizer,
    stop_token_ids: Sequence[int],
    reasoning: ReasoningFormat | None,
    calls: ToolFormat | None,
    *,
    tools: Sequence[Tool],
    reasoning_open: bool,
    stop: Sequence[str],
    call_id: Callable[[], str],
) -> OutputParser:
    """Build the parser of one output. With `calls` None, tool calls stay text."""
    if isinstance(calls, HarmonyFormat) or (reasoning is not None and reasoning.channels):
        lexer = Lexer(tokenizer, {}, stop_token_ids, stop=stop, inner=HARMONY_MARKS)
        known = calls if isinstance(calls, HarmonyFormat) else None
        return HarmonyParser(lexer, known, reasoning_open=reasoning_open, stop=stop, call_id=call_id, tools=tools)
    inner = calls.marks if calls is not None else ()
    lexer = Lexer(tokenizer, _spellings(reasoning, calls), stop_token_ids, stop=stop, inner=inner)
    label = reasoning.label if reasoning is not None else ""
    return OutputParser(
        lexer, calls, reasoning_open=reasoning_open, stop=stop, call_id=call_id, tools=tools, label=label
    )


def _spellings(reasoning: ReasoningFormat | None, calls: ToolFormat | None) -> dict[str, Mark]:
    found: dict[str, Mark] = {}
    if reasoning is not None:
        found |= {reasoning.opener: Mark.THINK_OPEN, reasoning.closer: Mark.THINK_CLOSE}
        found |= dict.fromkeys(reasoning.hidden, Mark.HIDDEN)
    if calls is not None:
        found |= {calls.opener: Mark.CALL_OPEN, calls.closer: Mark.CALL_CLOSE}
    return found
