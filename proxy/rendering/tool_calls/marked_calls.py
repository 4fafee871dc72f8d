"""Tool calls with the name outside the JSON: DeepSeek, Kimi, and Mistral's compact format.

Each call in a region is a head with the name, a mark, the arguments as a JSON object, and an end mark.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.engine.grammar import GrammarPart
from proxy.rendering.tool_calls.json_calls import ArgumentsReader, JsonFormat, JsonReader
from proxy.rendering.tool_calls.tool_format import CallReader, CallSink, Malformed, plausible, schema_of
from proxy.types import Tool

_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class MarkedFormat:
    """`begin` HEAD `middle` ARGUMENTS `end` for each call, between `opener` and `closer`.

    `head`: a pattern that finds the name (group 1) in HEAD. `written`: HEAD of a forced call, with the placeholder
    `{name}`. With `fenced`, the name follows `middle` on its own line, and the arguments are in a Markdown fence.
    """

    name: str
    opener: str
    closer: str
    begin: str
    middle: str
    end: str
    head: str
    written: str
    fenced: bool = False
    bare: str = ""
    separator: str | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.begin, self.middle, self.end)

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return MarkedReader(self, sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        fence = ("\n```json\n", "\n```") if self.fenced else ("", "")
        begin = f"{self.opener}{self.begin}{self.written.replace('{name}', tool.name)}{fence[0]}"
        return (
            GrammarPart(text=begin),
            GrammarPart(schema=schema_of(tool)),
            GrammarPart(text=f"{fence[1]}{self.end}{self.closer}"),
        )


class MarkedReader:
    """Reads a region. Only white space may separate calls."""

    def __init__(self, calls: MarkedFormat, sink: CallSink) -> None:
        self._format = calls
        self._sink = sink
        self._state = "between"
        self._head = ""
        self._tail = ""
        self._arguments: ArgumentsReader | None = None
        self._seen = 0
        self.done = False

    @property
    def idle(self) -> bool:
        return self._state == "between" and self._seen > 0

    def take(self, text: str, mark: bool) -> None:
        if mark:
            self._mark(text)
        elif self._state in ("head", "name"):
            self._in_head(text)
        elif self._state == "arguments":
            self._in_arguments(text)
        elif text.strip(_SPACE):
            raise Malformed

    def _mark(self, mark: str) -> None:
        calls = self._format
        if mark == calls.begin and self._state == "between":
            self._state, self._head = "head", ""
        elif mark == calls.middle and self._state == "head":
            self._middle()
        elif mark == calls.end and self._state in ("arguments", "name"):
            self._end()
        elif mark == calls.closer and self.idle:
            self.done = True
        elif self._state == "arguments":
            self._in_arguments(mark)
        else:
            raise Malformed

    def _middle(self) -> None:
        if self._format.fenced:
            self._state, self._head = "name", ""
            return
        found = re.fullmatch(self._format.head, self._head.strip(_SPACE))
        self._begin(found[1] if found else "")

    def _begin(self, name: str) -> None:
        if not plausible(name):
            raise Malformed
        self._arguments = ArgumentsReader(name, self._sink)
        self._state, self._tail = "arguments", ""

    def _in_head(self, text: str) -> None:
        self._head += text
        line, newline, rest = self._head.lstrip(_SPACE).partition("\n")
        if self._state == "head" or not newline:
            return
        opening = rest.lstrip(_SPACE)
        fence = re.match(r"```(?:json)?[ \t\r]*\n?\s*(?=\{)|(?=\{)", opening)
        if fence is not None:
            self._begin(line.strip(_SPACE))
            self._in_arguments(opening[fence.end() :])
        elif not re.fullmatch(r"`{0,3}|```j?s?o?n?\s*", opening):
            raise Malformed

    def _in_arguments(self, text: str) -> None:
        assert self._arguments is not None
        at = 0 if self._arguments.complete else self._arguments.push(text)
        self._tail += text[at:]
        tail = self._tail.strip(_SPACE)
        if tail and not (self._format.fenced and "```".startswith(tail)):
            raise Malformed

    def _end(self) -> None:
        if self._arguments is None and self._state == "name":
            self._begin(self._head.strip(_SPACE))
            self._in_arguments("{}")
        if self._arguments is None or not self._arguments.complete:
            raise Malformed
        self._arguments = None
        self._state = "between"
        self._seen += 1
        self._sink.end("")


@dataclass(frozen=True, slots=True)
class MistralFormat:
    """`[TOOL_CALLS][{"name", "arguments"}, ...]`, or since 2025 `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    name: str = "mistral"
    opener: str = "[TOOL_CALLS]"
    closer: str = ""
    marks: tuple[str, ...] = ("[CALL_ID]", "[ARGS]")
    bare: str = ""
    separator: str | None = None

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return _MistralReader(sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        return _MISTRAL_ARRAY.forced(tool)


_MISTRAL_ARRAY = JsonFormat("mistral", "[TOOL_CALLS]", "", several=True, head="[", tail="]")


class _MistralReader:
    """Reads either form, distinguished by the first character. A compact call's region ends with its arguments."""

    def __init__(self, sink: CallSink) -> None:
        self._sink = sink
        self._array: JsonReader | None = None
        self._head = ""
        self._name = ""
        self._arguments: ArgumentsReader | None = None
        self._ended = False

    @property
    def done(self) -> bool:
        return self._ended or (self._array is not None and self._array.done)

    @property
    def idle(self) -> bool:
        return self._array is not None and self._array.idle

    def take(self, text: str, mark: bool) -> None:
        if self._array is not None:
            self._array.take(text, False)
        elif self._arguments is not None:
            self._in_arguments(self._arguments, text)
        elif mark:
            self._mark(text)
        else:
            self._in_head(text)

    def _mark(self, mark: str) -> None:
        self._name = self._name or self._head.strip(_SPACE)
        if not plausible(self._name):
            raise Malformed
        if mark == "[ARGS]":
            self._arguments = ArgumentsReader(self._name, self._sink)

    def _in_head(self, text: str) -> None:
        self._head += text
        head = self._head.lstrip(_SPACE)
        if head[:1] in ("[", "{") and not self._name:
            self._array = JsonReader(_MISTRAL_ARRAY, self._sink)
            self._array.take(head, False)
        elif not self._name and "{" in head:
            name, _, rest = head.partition("{")
            self._name = name.strip(_SPACE)
            self._mark("[ARGS]")
            self.take("{" + rest, False)
        elif not self._name and not plausible(head.strip(_SPACE) or "x"):
            raise Malformed

    def _in_arguments(self, arguments: ArgumentsReader, text: str) -> None:
        at = arguments.push(text)
        if arguments.complete:
            self._ended = True
            self._sink.end(text[at:])
