"""Tool calls of gpt-oss (harmony): messages with a function as recipient and the arguments as content."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.engine.grammar import GrammarPart
from proxy.rendering.tool_calls.json_calls import ArgumentsReader
from proxy.rendering.tool_calls.tool_format import CallReader, CallSink, Malformed, plausible, schema_of
from proxy.types import Tool

HARMONY_MESSAGE, HARMONY_START = "<|message|>", "<|start|>"
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")

HARMONY_MARKS = (HARMONY_START, "<|channel|>", "<|constrain|>", HARMONY_MESSAGE, *HARMONY_ENDS)


@dataclass(frozen=True, slots=True)
class HarmonyFormat:
    """`to=functions.NAME` in a header, then the arguments as the message, ended by `<|call|>`."""

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
        # `<|call|>` is a stop token, so the model samples it without being forced.
        return (GrammarPart(text=begin), GrammarPart(schema=schema_of(tool)))


class _HarmonyReader:
    """Reads from the name on: the rest of the header, then the arguments."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._head = ""
        self._arguments: ArgumentsReader | None = None
        self.done = False
        self.idle = False

    def take(self, text: str, mark: bool) -> None:
        if self._arguments is None:
            self._in_head(text, mark)
        elif mark and text in HARMONY_ENDS:
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
        elif text != HARMONY_MESSAGE:
            self._head += " "
        else:
            name = self._head.split()[0] if self._head.split() else ""
            if not plausible(name):
                raise Malformed
            self._arguments = ArgumentsReader(name, self._sink)
