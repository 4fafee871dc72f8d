"""Tool calls in Python (`[f(a=1), g()]`) and Gemma (`call:f{a:1}`) notation.

The arguments must be translated to JSON, so a call is reported only once it is complete.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.engine.grammar import GrammarPart
from proxy.rendering.tool_calls.tagged_calls import cannot_force
from proxy.rendering.tool_calls.tool_format import CallReader, CallSink, Malformed
from proxy.types import Tool

_MAX_DEPTH = 100

_Calls = list[tuple[str, Any]]


@dataclass(frozen=True, slots=True)
class PythonFormat:
    """A Python list of calls with keyword arguments, between markers or as the whole answer."""

    name: str = "pythonic"
    opener: str = "<|python_start|>"
    closer: str = "<|python_end|>"
    bare: str = "["
    separator: str | None = None
    marks: tuple[str, ...] = ()

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return _PythonReader(self.closer, sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        raise cannot_force(self.name)


@dataclass(frozen=True, slots=True)
class GemmaFormat:
    """`call:` NAME `{` KEY `:` VALUE `,` ... `}`, with `quote` around strings."""

    name: str = "gemma4"
    opener: str = "<|tool_call>"
    closer: str = "<tool_call|>"
    quote: str = '<|"|>'
    bare: str = ""
    separator: str | None = None

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.quote,)

    def reader(self, tools: Sequence[Tool], sink: CallSink) -> CallReader:
        return _WholeReader(self.closer, lambda text: _gemma_calls(text, self.quote), sink)

    def forced(self, tool: Tool) -> tuple[GrammarPart, ...]:
        raise cannot_force(self.name)


class _WholeReader:
    """Collects text up to the closing marker, then reads it whole."""

    def __init__(self, closer: str, read: Callable[[str], _Calls], sink: CallSink) -> None:
        self._closer = closer
        self._read = read
        self._sink = sink
        self._parts: list[str] = []
        self.done = False
        self.idle = False

    def take(self, text: str, mark: bool) -> None:
        if mark and text == self._closer:
            self._give("")
        else:
            self._parts.append(text)

    def _give(self, rest: str) -> None:
        calls = [(name, _json_of(values)) for name, values in self._read("".join(self._parts).strip())]
        for index, (name, arguments) in enumerate(calls):
            self._sink.start(name)
            self._sink.arguments(arguments)
            self._sink.end(rest if index == len(calls) - 1 else "")
        self.done = True


class _PythonReader(_WholeReader):
    """Ends with the bracket that closes the list; a closing marker need not follow."""

    def __init__(self, closer: str, sink: CallSink) -> None:
        super().__init__(closer, _python_calls, sink)
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def take(self, text: str, mark: bool) -> None:
        if mark and text == self._closer:
            raise Malformed
        if not self._depth:
            text = text.lstrip()
            if text and text[0] != "[":
                raise Malformed
        for at, char in enumerate(text):
            self._step(char)
            if not self._depth:
                self._parts.append(text[: at + 1])
                self._give(text[at + 1 :])
                return
        self._parts.append(text)

    def _step(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = char == "\\"
            self._quote = "" if char == self._quote else self._quote
        elif char in "'\"":
            self._quote = char
        else:
            self._depth += (char in "[{(") - (char in "]})")


def _json_of(values: Any) -> str:
    try:
        text = json.dumps(values, ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise Malformed from None
    # A literal can contain a lone surrogate, which has no UTF-8 encoding: then all non-ASCII characters are escaped.
    return text if _is_text(text) else json.dumps(values)


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _python_calls(text: str) -> _Calls:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            raise Malformed
        return [_python_call(node) for node in tree.elts]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Malformed from None


def _python_call(node: ast.expr) -> tuple[str, dict[str, Any]]:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise Malformed
    values: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise Malformed
        values[keyword.arg] = _python_value(keyword.value)
    return ast.unparse(node.func), values


def _python_value(node: ast.expr) -> Any:
    match node:
        case ast.Name(id="true" | "false" | "null" as word):
            return {"true": True, "false": False, "null": None}[word]
        case ast.List(elts) | ast.Tuple(elts) | ast.Set(elts):
            return [_python_value(inner) for inner in elts]
        case ast.Dict(keys, values):
            return {_python_key(key): _python_value(value) for key, value in zip(keys, values, strict=True)}
        case ast.Constant(value) if value is None or isinstance(value, str | int | float):
            return value
        case ast.UnaryOp(ast.USub(), ast.Constant(value)) if type(value) in (int, float):
            return -value  # type: ignore[operator]
    raise Malformed


def _python_key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise Malformed


def _gemma_calls(text: str, quote: str) -> _Calls:
    name, brace, rest = text.removeprefix("call:").partition("{")
    name = name.strip()
    if not text.startswith("call:") or not brace or not name or re.search(r"[\s<>\"]", name):
        raise Malformed
    return [(name, _GemmaValue(brace + rest, quote).read())]


class _GemmaValue:
    """Parses one object: keys without quotes, strings between two `quote`s, otherwise JSON words and numbers."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def read(self) -> Any:
        value = self._value(0)
        self._skip_space()
        if self._at != len(self._text):
            raise Malformed
        return value

    def _value(self, depth: int) -> Any:
        self._skip_space()
        if depth > _MAX_DEPTH:
            raise Malformed
        if self._text.startswith(self._quote, self._at):
            return self._string()
        if self._take("{"):
            return dict(self._items("}", lambda: self._pair(depth)))
        if self._take("["):
            return self._items("]", lambda: self._value(depth + 1))
        return self._word()

    def _items(self, closer: str, item: Callable[[], Any]) -> list[Any]:
        found: list[Any] = []
        if self._take(closer):
            return found
        while True:
            found.append(item())
            if self._take(closer):
                return found
            if not self._take(","):
                raise Malformed

    def _pair(self, depth: int) -> tuple[str, Any]:
        self._skip_space()
        key = self._string() if self._text.startswith(self._quote, self._at) else self._until(":,{}[]")
        if not key or not self._take(":"):
            raise Malformed
        return key, self._value(depth + 1)

    def _string(self) -> str:
        begin = self._at + len(self._quote)
        end = self._text.find(self._quote, begin)
        if end < 0:
            raise Malformed
        self._at = end + len(self._quote)
        return self._text[begin:end]

    def _word(self) -> Any:
        word = self._until(",}]")
        if not word:
            raise Malformed
        try:
            return json.loads(word)
        except ValueError:
            return word

    def _until(self, stops: str) -> str:
        begin = self._at
        while self._at < len(self._text) and self._text[self._at] not in stops:
            self._at += 1
        return self._text[begin : self._at].strip()

    def _take(self, char: str) -> bool:
        self._skip_space()
        found = self._text.startswith(char, self._at)
        self._at += found
        return found

    def _skip_space(self) -> None:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
