"""What every way of writing calls has in common: a reader that is fed what stands after the opener, piece by piece.

A reader tells a sink what it found as soon as it is certain. It raises Malformed at the first character that cannot
be part of a call; where that is depends on the text alone, never on how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

from proxy.engine.grammar import GrammarPart
from proxy.types import Tool


class Malformed(Exception):
    """What was read cannot become a call of the format. Never leaves the parser."""


class CallSink(Protocol):
    """`start` begins a call, `arguments` adds to the text of its JSON object, `end` closes it.

    `rest` is what is left of the piece that was being read: nothing of it belongs to the call.
    """

    def start(self, name: str) -> None: ...
    def arguments(self, fragment: str) -> None: ...
    def end(self, rest: str) -> None: ...


class CallReader(Protocol):
    """Reads the region after an opener: one call or several.

    `take` gets text, or with `mark` one of the format's marks (the region's closer included). `done`: the region is
    over. `idle`: between calls, so the output may end here. Raises Malformed.
    """

    @property
    def done(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def take(self, text: str, mark: bool) -> None: ...


class ToolFormat(Protocol):
    """How one family writes calls.

    `opener` begins a region of calls and `closer` ends it (empty: it ends with its last call, or with the output).
    `marks` are further markers inside a region. `bare`: characters with which a call may begin without an opener, as
    the first of an answer; it then has to name a tool that is there. `separator` stands between two forced calls,
    None where only one can be forced.
    """

    @property
    def name(self) -> str: ...
    @property
    def opener(self) -> str: ...
    @property
    def closer(self) -> str: ...
    @property
    def marks(self) -> tuple[str, ...]: ...
    @property
    def bare(self) -> str: ...
    @property
    def separator(self) -> str | None: ...

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        """A reader of one region."""

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        """What a forced call of `tool` looks like, markers included. Raises UnsupportedParameter."""


class _Collected:
    """The calls of one region, complete ones only."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self._name = ""
        self._parts: list[str] = []

    def start(self, name: str) -> None:
        self._name, self._parts = name, []

    def arguments(self, fragment: str) -> None:
        self._parts.append(fragment)

    def end(self, rest: str) -> None:
        self.calls.append((self._name, "".join(self._parts)))


def read_calls(calls: ToolFormat, text: str, tools: Sequence[Tool] = ()) -> list[tuple[str, str]]:
    """Names and arguments of the first region of calls written in `text`; markers are found by their text."""
    _, opener, region = text.partition(calls.opener)
    if not opener:
        starts = [text.find(char) for char in calls.bare if char in text]
        if not starts:
            return []
        region = text[min(starts) :]
    sink = _Collected()
    reader = calls.reader(tools, sink)
    try:
        for piece, mark in split_marks(region, (*calls.marks, calls.closer)):
            reader.take(piece, mark)
            if reader.done:
                break
    except Malformed:
        pass
    return sink.calls


def split_marks(text: str, marks: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Pieces of `text`, each with whether it is one of `marks`."""
    pattern = spelling_pattern(tuple(mark for mark in marks if mark))
    if pattern is None:
        yield text, False
        return
    at = 0
    for found in pattern.finditer(text):
        if found.start() > at:
            yield text[at : found.start()], False
        yield found.group(), True
        at = found.end()
    if at < len(text):
        yield text[at:], False


@lru_cache(maxsize=256)
def spelling_pattern(spellings: tuple[str, ...]) -> re.Pattern[str] | None:
    """Finds any of `spellings`, the longest first where one begins another."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if spellings else None


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """The JSON schema of the arguments: an object, also where the client gave none."""
    return tool.parameters or {"type": "object", "properties": {}}


def quoted(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def plausible(name: str) -> bool:
    """Whether an unquoted name can be one: any characters but those that only structure or prose has."""
    return bool(name) and not re.search(r"[\s<>{}\[\]\"'`]", name)
