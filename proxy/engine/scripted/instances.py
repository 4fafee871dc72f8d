"""Instances of a JSON schema, filled with the numbers, quoted words and names of a text. Deterministic.

The schema (type, enum, const, bounds, required keys) takes precedence; the text only provides values. `pattern` is
ignored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_QUOTED = re.compile(r"\"([^\"]+)\"|(?<!\w)'([^']+)'(?!\w)|“([^”]+)”|`([^`]+)`")
_NUMBER = re.compile(r"(?<![\w.])-?\d+(?:\.\d+)?")
_NAME = re.compile(r"\b[A-Z][\w-]*(?: [A-Z][\w-]*)*")
# Words that often begin a request, capitalised, and are not names.
_PLAIN = frozenset(
    re.findall(
        r"[\w']+",
        "a add and answer any ask book call calculate create describe do explain find get give hello hi how i if in "
        "invent is it json let list look make name now or please read reply return run say search send tell test "
        "the then this to two use using what what's when where which who why write you",
    )
)
_FORMATS = {
    "date": "2026-01-01",
    "date-time": "2026-01-01T00:00:00Z",
    "time": "12:00:00Z",
    "email": "someone@example.com",
    "uri": "https://example.com/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}
_DEPTH_LIMIT = 12
"""The nesting depth below which a value is null: recursive schemas must end, and tool arguments are not as deep."""


@dataclass(slots=True)
class Mentions:
    """The values in `text`, consumed in order: `words` (quoted words, else capitalised ones) and `numbers`."""

    text: str
    words: list[str] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, text: str) -> Mentions:
        """Find the words and numbers of `text`."""
        return cls(text, mentioned_words(text), [_number(found) for found in _NUMBER.findall(text)])

    def word(self, name: str) -> str:
        """Return the value for the key `name`.

        It is the value that the text gives ("name: word", "name exactly: text"), else the next word, else the start of
        the text, else `name`.
        """
        given = re.search(rf"\b{re.escape(name)}(?: exactly:\s*(?s:(.+))|[:=]\s*(\S+))", self.text)
        if given:
            return given[1] or given[2]
        if self.words:
            return self.words.pop(0)
        return " ".join(self.text.split())[:80] or name

    def number(self) -> float:
        """Consume the next number; 1 if none is left."""
        return self.numbers.pop(0) if self.numbers else 1


def mentioned_words(text: str) -> list[str]:
    """The quoted words of `text` in order; if nothing is quoted, its capitalised names."""
    quoted = [next(filter(None, found)) for found in _QUOTED.findall(text)]
    if quoted:
        return quoted
    begins = text.lstrip().split(maxsplit=1)[:1]
    names = dict.fromkeys(_without_plain(found) for found in _NAME.findall(text))
    names = {name: None for name in names if len(name) > 1 and (not name.isupper() or name.isdigit())}
    first = [name for name in names if name in begins]  # more likely a verb than a name
    return [name for name in names if name not in first] or first


def instance(schema: Mapping[str, Any] | bool, mentions: Mentions, name: str = "value") -> Any:
    """Return an instance of `schema`, consuming `mentions`. `name`: the key of the value."""
    root = schema if isinstance(schema, Mapping) else {}
    return _Filling(root, mentions).value(root, name, 0)


@dataclass(frozen=True, slots=True)
class _Filling:
    root: Mapping[str, Any]
    mentions: Mentions

    def value(self, schema: Any, name: str, depth: int) -> Any:
        schema = self._resolved(schema)
        if "const" in schema:
            return schema["const"]
        if options := schema.get("enum"):
            text = self.mentions.text.lower()
            return next((option for option in options if str(option).lower() in text), options[0])
        return self._typed(schema, name, depth) if depth < _DEPTH_LIMIT else None

    def _typed(self, schema: Mapping[str, Any], name: str, depth: int) -> Any:
        match self._type(schema):
            case "object":
                return self._object(schema, depth)
            case "array":
                return self._array(schema, name, depth)
            case "integer":
                return int(_bounded(schema, self.mentions.number()))
            case "number":
                return _bounded(schema, self.mentions.number())
            case "boolean":
                return True
            case "null":
                return None
            case _:
                return self._string(schema, name)

    def _type(self, schema: Mapping[str, Any]) -> str:
        kind = schema.get("type")
        if isinstance(kind, list):
            kind = next((one for one in kind if one != "null"), "null")
        if kind is None:
            return "object" if "properties" in schema else "array" if "items" in schema else "string"
        return str(kind)

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        keys = schema.get("required") or list(properties)
        return {key: self.value(properties.get(key, {}), key, depth + 1) for key in keys}

    def _array(self, schema: Mapping[str, Any], name: str, depth: int) -> list[Any]:
        items = schema.get("items", {})
        kind = self._type(self._resolved(items))
        there = {"string": len(self.mentions.words), "number": len(self.mentions.numbers)}
        count = there.get("number" if kind == "integer" else kind, 1)
        count = max(schema.get("minItems", 1), min(max(count, 1), schema.get("maxItems", count or 1)))
        return [self.value(items, name, depth + 1) for _ in range(count)]

    def _string(self, schema: Mapping[str, Any], name: str) -> str:
        if schema.get("format") in _FORMATS:
            return _FORMATS[schema["format"]]
        word = self.mentions.word(name)
        word = word.ljust(int(schema.get("minLength", 0)), ".")
        return word[: int(schema["maxLength"])] if "maxLength" in schema else word

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """Follow `$ref`, take the first alternative that is not null, and merge `allOf`."""
        found: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        for _ in range(_DEPTH_LIMIT):
            if "$ref" in found:
                found = {**self._pointed(found["$ref"]), **{k: v for k, v in found.items() if k != "$ref"}}
            elif options := found.get("anyOf") or found.get("oneOf"):
                found = next((one for one in options if one.get("type") != "null"), options[0])
            elif parts := found.get("allOf"):
                found = _merged(found, [self._resolved(part) for part in parts])
            else:
                break
        return found

    def _pointed(self, reference: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self.root
        for step in reference.removeprefix("#").strip("/").split("/"):
            inner = found.get(step)
            found = inner if isinstance(inner, Mapping) else {}
        return found


def _merged(schema: Mapping[str, Any], parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    out = {key: value for key, value in schema.items() if key != "allOf"}
    for part in parts:
        properties = {**out.get("properties", {}), **part.get("properties", {})}
        required = list(dict.fromkeys([*out.get("required", ()), *part.get("required", ())]))
        out = {**out, **part, **({"properties": properties, "required": required} if properties else {})}
    return out


def _bounded(schema: Mapping[str, Any], number: float) -> float:
    whole = schema.get("type") == "integer"
    if whole:
        number = int(number)
    low, high = schema.get("minimum"), schema.get("maximum")
    if (above := schema.get("exclusiveMinimum")) is not None and not isinstance(above, bool):
        low = above + 1 if whole or low is None else max(low, above + 1)
    if (below := schema.get("exclusiveMaximum")) is not None and not isinstance(below, bool):
        high = below - 1
    number = number if low is None else max(number, low)
    return number if high is None else min(number, high)


def _number(text: str) -> float:
    return float(text) if "." in text else int(text)


def _without_plain(name: str) -> str:
    words = name.split(" ")
    while words and words[0].lower() in _PLAIN:
        words.pop(0)
    return " ".join(words)
