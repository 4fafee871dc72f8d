"""Tool calls written as tags, one per argument: Qwen3-Coder, Qwen3.5, Nemotron, MiniMax, GLM, DeepSeek V3.2.

The tool's schema gives the JSON type of each argument. An argument that can only be a string is streamed as sampled;
any other argument is sent once it is complete. Only the line breaks that the template writes are stripped from a value.
A parameter written twice appears twice in the JSON, and the last one counts, as in the reference parsers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.engine.grammar import GrammarPart
from proxy.rendering.tool_calls.argument_types import ParameterTypes, is_text, json_of, string_of
from proxy.rendering.tool_calls.tool_format import CallReader, CallSink, Malformed, plausible, quoted
from proxy.types import Tool
from tokengrove.errors import UnsupportedParameter


@dataclass(frozen=True, slots=True)
class TagFormat:
    """`call` NAME `>`, then `key` NAME `>` VALUE `end_value` for each argument, then `end_call`.

    `quote`: surrounds the names. `lines`: values are on lines of their own. `typed`: the tag states if the value is
    a string.
    """

    name: str
    opener: str
    closer: str
    call: str = "<function="
    end_call: str = "</function>"
    key: str = "<parameter="
    end_value: str = "</parameter>"
    quote: str = ""
    lines: bool = False
    typed: bool = False
    bare: str = ""
    separator: str | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.call, self.end_call, self.key, self.end_value)

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return TagReader(self, tools, sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        raise cannot_force(self.name)


@dataclass(frozen=True, slots=True)
class PairFormat:
    """GLM: NAME, then `<arg_key>` KEY `</arg_key>` `<arg_value>` VALUE `</arg_value>` for each argument."""

    name: str = "glm45"
    opener: str = "<tool_call>"
    closer: str = "</tool_call>"
    bare: str = ""
    separator: str | None = None
    marks: tuple[str, ...] = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return PairReader(self, tools, sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        raise cannot_force(self.name)


def cannot_force(name: str) -> UnsupportedParameter:
    """Return the error for a forced call in a format whose arguments are not JSON."""
    return UnsupportedParameter(
        f"tool calls in the format {name} cannot be forced: their arguments are not JSON; use 'tool_choice' auto",
        param="tool_choice",
    )


class ArgumentWriter:
    """Writes the JSON arguments of one call, parameter by parameter. `lines`: as in TagFormat."""

    def __init__(self, types: ParameterTypes, sink: CallSink, *, lines: bool) -> None:
        self._types = types
        self._sink = sink
        self._lines = lines
        self._name = ""
        self._count = 0
        self._allowed: frozenset[str] = frozenset()
        self._held = ""
        self._lead = False

    def begin(self, name: str) -> None:
        """Begin a call of `name`; it starts in the sink with its first parameter."""
        if not plausible(name):
            raise Malformed
        self._name, self._count = name, 0

    def open(self, key: str, allowed: frozenset[str] | None = None) -> None:
        """Begin a parameter. `allowed`: the JSON types that its tag gives; None: the types of the schema."""
        if not key or any(char in key for char in '<>\n"'):
            raise Malformed
        self._allowed = self._types.of(self._name, key) if allowed is None else allowed
        self._held, self._lead = "", self._lines
        if not self._count:
            self._sink.start(self._name)
        self._sink.arguments(f"{', ' if self._count else '{'}{quoted(key)}: {chr(34) if self._is_text else ''}")
        self._count += 1

    def piece(self, text: str) -> None:
        """Append to the value of the open parameter."""
        if self._lead and text:
            text = text.removeprefix("\n")
            self._lead = False
        self._held += text
        if self._is_text:
            keep = 1 if self._lines and self._held.endswith("\n") else 0
            shown = self._held[: len(self._held) - keep]
            self._held = self._held[len(shown) :]
            if shown:
                self._sink.arguments(string_of(shown)[1:-1])

    def close(self) -> None:
        """End the open parameter."""
        text = self._held.removesuffix("\n") if self._lines else self._held
        self._sink.arguments('"' if self._is_text else json_of(text, self._allowed))

    def finish(self) -> None:
        """Write the end of the arguments. The reader itself ends the call."""
        if not self._count:
            self._sink.start(self._name)
        self._sink.arguments("}" if self._count else "{}")

    @property
    def _is_text(self) -> bool:
        return is_text(self._allowed)


class TagReader:
    """Reads one or several calls between opener and closer. Only white space may separate the tags."""

    def __init__(self, calls: TagFormat, tools: Sequence[Tool], sink: CallSink) -> None:
        self._format = calls
        self._sink = sink
        self._writer = ArgumentWriter(ParameterTypes(tools), sink, lines=calls.lines)
        self._state = "between"
        self._label = ""
        self._seen = 0
        self.done = False

    @property
    def idle(self) -> bool:
        return self._state == "between" and self._seen > 0

    def take(self, text: str, mark: bool) -> None:
        if mark and self._state not in ("name", "key"):
            self._mark(text)
        elif self._state in ("name", "key"):
            self._in_label(text)
        elif self._state == "value":
            self._writer.piece(text)
        elif text.strip():
            raise Malformed

    def _mark(self, mark: str) -> None:
        calls = self._format
        if self._state == "value":
            self._in_value(mark)
        elif mark == calls.call and self._state == "between":
            self._state, self._label = "name", ""
        elif mark == calls.key and self._state == "parameters":
            self._state, self._label = "key", ""
        elif mark == calls.end_call and self._state == "parameters":
            self._end()
        elif mark == calls.closer:
            # Models forget the inner closing tag; the outer tag implies it.
            if self._state == "parameters":
                self._end()
            if not self.idle:
                raise Malformed
            self.done = True
        else:
            raise Malformed

    def _in_value(self, mark: str) -> None:
        if mark == self._format.end_value:
            self._writer.close()
            self._state = "parameters"
        elif mark == self._format.closer:
            raise Malformed
        else:
            self._writer.piece(mark)

    def _end(self) -> None:
        self._writer.finish()
        self._state = "between"
        self._seen += 1
        self._sink.end("")

    def _in_label(self, text: str) -> None:
        self._label += text
        label, found, rest = self._label.partition(">")
        if not found:
            return
        if self._state == "name":
            self._writer.begin(self._unquoted(label))
            self._state = "parameters"
        else:
            self._open(label)
            self._state = "value"
        if rest:
            self.take(rest, False)

    def _open(self, label: str) -> None:
        if not self._format.typed:
            self._writer.open(self._unquoted(label))
            return
        label, found, kind = label.partition(' string="')
        if found and kind not in ('true"', 'false"'):
            raise Malformed
        self._writer.open(self._unquoted(label), frozenset({"string"}) if kind == 'true"' else None)

    def _unquoted(self, label: str) -> str:
        label = label.strip()
        quote = self._format.quote
        if not quote:
            return label
        if len(label) < 2 or not (label.startswith(quote) and label.endswith(quote)):
            raise Malformed
        return label[1:-1]


class PairReader:
    """Reads one call."""

    def __init__(self, calls: PairFormat, tools: Sequence[Tool], sink: CallSink) -> None:
        self._format = calls
        self._sink = sink
        self._writer = ArgumentWriter(ParameterTypes(tools), sink, lines=False)
        self._state = "name"
        self._label = ""
        self.done = False

    @property
    def idle(self) -> bool:
        return False

    def take(self, text: str, mark: bool) -> None:
        if mark:
            self._mark(text)
        elif self._state in ("name", "key"):
            self._label += text
        elif self._state == "value":
            self._writer.piece(text)
        elif text.strip():
            raise Malformed

    def _mark(self, mark: str) -> None:
        key, end_key, value, end_value = self._format.marks
        if self._state == "value" and mark != self._format.closer:
            self._in_value(mark, end_value)
        elif mark == key and self._state in ("name", "pairs"):
            self._named()
            self._state, self._label = "key", ""
        elif mark == end_key and self._state == "key":
            self._state = "paired"
        elif mark == value and self._state == "paired":
            self._writer.open(self._label.strip())
            self._state = "value"
        elif mark == self._format.closer and self._state in ("name", "pairs"):
            self._named()
            self._writer.finish()
            self._sink.end("")
            self.done = True
        else:
            raise Malformed

    def _named(self) -> None:
        if self._state == "name":
            self._writer.begin(self._label.strip())

    def _in_value(self, mark: str, end_value: str) -> None:
        if mark == end_value:
            self._writer.close()
            self._state = "pairs"
        else:
            self._writer.piece(mark)
