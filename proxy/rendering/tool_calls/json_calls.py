"""Tool calls written as JSON objects with a name and arguments: Hermes, Qwen, Llama, Mistral, Phi, Cohere.

A call begins once its name and the beginning of its arguments are read; from there on, the arguments are streamed as
sampled. Arguments that precede the name are held until the name is read. Arguments in a JSON string (some fine-tunes
encode twice) are held until the string ends.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proxy.engine.grammar import GrammarPart
from proxy.rendering.tool_calls.json_text import JsonText
from proxy.rendering.tool_calls.tool_format import CallReader, CallSink, Malformed, quoted, schema_of
from proxy.types import Tool

_SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class JsonFormat:
    """One call, or several in an array or one after the other, between the markers.

    `names` and `arguments`: the accepted keys; a forced call uses the first. `several`: a region may contain an array
    or several calls, otherwise exactly one object. `head` and `tail`: text before and after a forced call.
    """

    name: str
    opener: str
    closer: str
    names: tuple[str, ...] = ("name",)
    arguments: tuple[str, ...] = ("arguments", "parameters")
    several: bool = False
    head: str = "\n"
    tail: str = "\n"
    separator: str | None = None
    bare: str = ""
    marks: tuple[str, ...] = ()

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return JsonReader(self, sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        begin = f'{self.opener}{self.head}{{"{self.names[0]}": {quoted(tool.name)}, "{self.arguments[0]}": '
        end = f"}}{self.tail}{self.closer}"
        return (GrammarPart(text=begin), GrammarPart(schema=schema_of(tool)), GrammarPart(text=end))


class JsonReader:
    """Reads the JSON objects of a region."""

    def __init__(self, calls: JsonFormat, sink: CallSink) -> None:
        self._format = calls
        self._sink = sink
        self._array = False
        self._closed = False
        self._call: ObjectReader | None = None
        self._seen = 0
        self._alone = bool(calls.closer) and not calls.several
        self.done = False

    @property
    def idle(self) -> bool:
        return self._call is None and self._seen > 0 and not self._alone

    def take(self, text: str, mark: bool) -> None:
        if mark and text == self._format.closer:
            if self._call is not None or not self._seen or (self._array and not self._closed):
                raise Malformed
            self.done = True
            if self._alone:
                self._sink.end("")
            return
        at = 0
        while at < len(text) and not self.done:
            at = self._between(text, at) if self._call is None else self._inside(text, at)

    def _inside(self, text: str, at: int) -> int:
        assert self._call is not None
        at = self._call.push(text, at)
        if self._call.complete:
            self._call = None
            self._seen += 1
            if self._alone:
                self._closed = True
            else:
                self._sink.end(text[at:])
        return at

    def _between(self, text: str, at: int) -> int:
        char = text[at]
        several = self._format.several
        if char in _SPACE:
            return at + 1
        if self._closed:
            raise Malformed
        if char == "{" and (several or not self._seen):
            self._call = ObjectReader(self._format.names, self._format.arguments, self._sink)
            return at
        if several and char == "[" and not self._array and not self._seen:
            self._array = True
        elif self._array and char == "]" and self._seen:
            self._closed = True
            self.done = not self._format.closer
        elif not (several and self._seen and char in (",;" if not self._array else ",")):
            return self._strange(at)
        return at + 1

    def _strange(self, at: int) -> int:
        """End the region. Without a closing marker, text after the last call does not belong to the region."""
        if not self._seen or self._format.closer or self._array:
            raise Malformed
        self.done = True
        return at


class ObjectReader:
    """Reads one `{"name": ..., "arguments": {...}}`, with keys in any order; other keys are ignored."""

    def __init__(self, names: tuple[str, ...], arguments: tuple[str, ...], sink: CallSink) -> None:
        self._names = names
        self._arguments = arguments
        self._sink = sink
        self._member: JsonText | None = None
        self._kind = ""
        self._parts: list[str] = []
        self._name = ""
        self._waiting: list[str] | None = None
        self._started = False
        self._has_arguments = False
        self._state = "open"

    @property
    def complete(self) -> bool:
        return self._state == "done"

    def push(self, text: str, at: int) -> int:
        """Read `text[at:]` and return the index after the part taken. Raises Malformed."""
        while at < len(text) and self._state != "done":
            if self._member is not None:
                at = self._in_member(self._member, text, at)
            elif text[at] in _SPACE:
                at += 1
            else:
                at = self._between(text[at], at)
        return at

    def _between(self, char: str, at: int) -> int:
        if self._state == "open" and char == "{":
            self._state = "first"
        elif self._state in ("first", "key") and char == '"':
            self._member, self._kind, self._parts = JsonText(), "key", []
            return at
        elif self._state == "colon" and char == ":":
            self._member, self._parts = JsonText(), []
            if self._kind == "arguments" and (self._has_arguments or self._started):
                raise Malformed
        elif self._state == "next" and char == ",":
            self._state = "key"
        elif self._state in ("next", "first") and char == "}":
            self._finish()
        else:
            raise Malformed
        return at + 1

    def _in_member(self, member: JsonText, text: str, at: int) -> int:
        end = member.push(text, at)
        piece = text[at:end]
        if self._kind == "arguments":
            self._argument_piece(member, piece)
        else:
            self._parts.append(piece)
        if member.broken:
            raise Malformed
        if member.complete:
            self._member = None
            self._member_done("".join(self._parts))
        return end

    def _member_done(self, text: str) -> None:
        if self._state != "colon":
            key = json.loads(text)
            self._kind = "name" if key in self._names else "arguments" if key in self._arguments else "other"
            self._state = "colon"
            return
        self._state = "next"
        if self._kind == "name":
            self._take_name(json.loads(text))
        elif self._kind == "arguments":
            self._has_arguments = True
            if text.lstrip(_SPACE).startswith('"'):
                self._take_encoded(json.loads(text))

    def _take_name(self, name: Any) -> None:
        if self._name or not isinstance(name, str) or not name:
            raise Malformed
        self._name = name
        if self._waiting is not None:
            self._begin("".join(self._waiting))

    def _take_encoded(self, text: str) -> None:
        if not isinstance(loads(text), dict):
            raise Malformed
        if self._name:
            self._begin(text.strip(_SPACE))
        else:
            self._waiting = [text.strip(_SPACE)]

    def _argument_piece(self, member: JsonText, piece: str) -> None:
        if not self._parts:
            piece = piece.lstrip(_SPACE)
            if piece and piece[0] not in '{"':
                raise Malformed
        if piece:
            self._parts.append(piece)
        if not self._parts or self._parts[0].startswith('"'):
            return
        if self._started:
            self._sink.arguments(piece)
        elif member.valid_start:
            if self._name:
                self._begin("".join(self._parts))
            else:
                self._waiting = self._parts

    def _begin(self, arguments: str) -> None:
        self._started = True
        self._sink.start(self._name)
        self._sink.arguments(arguments)

    def _finish(self) -> None:
        if not self._name:
            raise Malformed
        if not self._started:
            self._begin("{}")
        self._state = "done"


class ArgumentsReader:
    """Reads the arguments of a call with a known name: a JSON object. The call starts once a valid object begins."""

    def __init__(self, name: str, sink: CallSink) -> None:
        self._name = name
        self._sink = sink
        self._json = JsonText()
        self._parts: list[str] = []
        self._started = False

    @property
    def complete(self) -> bool:
        return self._json.complete

    def push(self, text: str, at: int = 0) -> int:
        """Read `text[at:]` and return the index after the part taken. Raises Malformed."""
        end = self._json.push(text, at)
        piece = text[at:end]
        if self._started:
            self._sink.arguments(piece)
        else:
            self._hold(piece)
        if self._json.broken:
            raise Malformed
        return end

    def _hold(self, piece: str) -> None:
        if not self._parts:
            piece = piece.lstrip(_SPACE)
            if piece and piece[0] != "{":
                raise Malformed
        if piece:
            self._parts.append(piece)
        if self._parts and self._json.valid_start:
            self._started = True
            self._sink.start(self._name)
            self._sink.arguments("".join(self._parts))


def loads(text: str) -> Any:
    """Return the value of standard JSON, or None. NaN, which Python accepts, is refused."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)
