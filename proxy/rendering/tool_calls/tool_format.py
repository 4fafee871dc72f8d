"""The interface of a tool-call format: a reader that receives the text after the opening marker, piece by piece.

A reader reports calls to a sink as soon as they are certain, and raises Malformed at the first character that cannot
be part of a call. This place depends on the text alone, never on how it was divided into pieces.
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
    """The text cannot become a call of this format. Never leaves the parser."""


class CallSink(Protocol):
    """Receives calls: `start` begins one, `arguments` appends to the JSON text of its arguments, `end` closes it.

    `rest`: the part of the current piece after the call.
    """

    def start(self, name: str) -> None: ...
    def arguments(self, fragment: str) -> None: ...
    def end(self, rest: str) -> None: ...


class CallReader(Protocol):
    """Reads the region after an opening marker: one or several calls.

    `take` receives text or, with `mark`, one of the format's marks (the closing mark included); it raises Malformed.
    `done`: the region has ended. `idle`: between calls, so the output may end here.
    """

    @property
    def done(self) -> bool: ...
    @property
    def idle(self) -> bool: ...
    def take(self, text: str, mark: bool) -> None: ...


class ToolFormat(Protocol):
    """The way in which a family of models writes tool calls.

    `opener`: begins a region of calls. `closer`: ends it; if empty, the region ends with its last call or with the
    output. `marks`: further markers inside a region. `bare`: characters with which a call may begin without an opener
    at the start of an answer; such a call must name one of the request's tools. `separator`: the text between two
    forced calls; None if only one can be forced.
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
        """Return a reader for one region of calls; it writes to `sink`."""

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        """Return the grammar of a forced call of `tool`, markers included.

        Raises UnsupportedParameter if the format's arguments are not JSON.
        """


class _Collected:
    """A CallSink that keeps complete calls."""

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
    """Return names and arguments (JSON text) of the complete calls in the first region of `text`.

    Markers are found as text.
    """
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
    """Split `text` at `marks`. Yields each piece and whether it is a mark."""
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
    """Compile a pattern that finds any of `spellings`, preferring longer ones. None if there are none."""
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if spellings else None


def schema_of(tool: Tool) -> Mapping[str, Any]:
    """Return the JSON schema of the arguments in a forced call."""
    return tool.held_schema


def quoted(name: str) -> str:
    """Return `name` as a JSON string."""
    return json.dumps(name, ensure_ascii=False)


def plausible(name: str) -> bool:
    """Return whether a name without quotes is possible: it has no white space, brackets or quotes."""
    return bool(name) and not re.search(r"[\s<>{}\[\]\"'`]", name)
