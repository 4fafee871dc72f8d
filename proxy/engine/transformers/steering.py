"""Steering of a constrained output to its end: of the tokens that the grammar allows, those that close structures.

Narrowing never empties a mask and never allows what the grammar forbids. Inside a string, only a quote closes. Outside,
markers and closing brackets come first, then separators, then the beginnings of the shortest values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

_END_OF_STRING = re.compile(rb'"[}\]]*')
_END_OF_VALUE = re.compile(rb"[}\]]+")
_SEPARATOR = re.compile(rb"[,:]")
_SHORT_STRING = re.compile(rb'"{1,2}')
_DIGIT = re.compile(rb"[0-9]")

_MAX_DEPTH = 6
"""The depth to which a schema is followed to estimate the length of an instance."""

_MAX_VALUES = 1000
"""The maximum number of values of a schema in the estimate, since a recursive schema has infinitely many."""

_MAX_CHARS = 20_000
"""The maximum number of characters of the estimate, and about that of an array's elements."""


class Steering:
    """The token classes of one vocabulary. `token_bytes[i]`: the text of token `i`, empty for a special token."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        import numpy as np

        def matching(pattern: re.Pattern[bytes]) -> Any:
            return np.fromiter((bool(pattern.fullmatch(text)) for text in token_bytes), dtype=bool)

        self._bytes = token_bytes
        self._in_string = (matching(_END_OF_STRING),)
        self._outside = tuple(matching(kind) for kind in (_END_OF_VALUE, _SEPARATOR, _SHORT_STRING, _DIGIT))

    def narrow(self, mask: Any, in_string: bool, marker_ids: tuple[int, ...]) -> Any:
        """The tokens of `mask` (bool [vocabulary]) in the first class with any of them, else all of them."""
        import numpy as np

        if not in_string and marker_ids and mask[list(marker_ids)].any():
            markers = np.zeros_like(mask)
            markers[list(marker_ids)] = True
            return mask & markers
        for kind in self._in_string if in_string else self._outside:
            closing = mask & kind
            if closing.any():
                return closing
        return mask

    def scan(self, token: int, in_string: bool, escaped: bool) -> tuple[bool, bool]:
        """Return whether the text after `token` is inside a JSON string, and whether a backslash precedes it there."""
        for byte in self._bytes[token]:
            if escaped:
                escaped = False
            elif in_string and byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = not in_string
        return in_string, escaped


def skeleton(schema: Any) -> str:
    """An approximate JSON text with every property of `schema` once, which estimates the longest rest of a value."""
    return _skeleton(schema, schema, 0, iter(range(_MAX_VALUES)))[:_MAX_CHARS]


def _skeleton(schema: Any, root: Any, depth: int, left: Iterator[int]) -> str:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or next(left, None) is None:
        return '""'
    if "$ref" in schema:
        return _skeleton(_resolve(str(schema["$ref"]), root), root, depth + 1, left)
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        return max((repr(value) for value in values), key=len, default='""') if isinstance(values, list) else '""'
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            return max((_skeleton(option, root, depth + 1, left) for option in schema[choice]), key=len, default='""')
    if isinstance(schema.get("allOf"), list):
        return "".join(_skeleton(part, root, depth + 1, left) for part in schema["allOf"])
    return _plain(schema, root, depth, left)


def _plain(schema: Mapping[str, Any], root: Any, depth: int, left: Iterator[int]) -> str:
    properties = schema.get("properties")
    if isinstance(properties, Mapping):
        fields = (f'"{name}": {_skeleton(value, root, depth + 1, left)}' for name, value in properties.items())
        return "{" + ", ".join(fields) + "}"
    if "items" in schema or "prefixItems" in schema:
        return _array(schema, root, depth, left)
    if schema.get("type") == "string" or "pattern" in schema or "format" in schema:
        return '"' + "x " * _count(schema.get("minLength")) + _pattern_room(schema) + '"'
    return "-12.5" if schema.get("type") in ("number", "integer") else '{"": ""}'


def _array(schema: Mapping[str, Any], root: Any, depth: int, left: Iterator[int]) -> str:
    given = schema.get("prefixItems")
    first = [_skeleton(item, root, depth + 1, left) for item in (given if isinstance(given, list) else ())]
    one = _skeleton(schema.get("items", True), root, depth + 1, left)
    rest = [one] * max(1, min(_count(schema.get("minItems")), _MAX_CHARS // max(1, len(one))))
    return "[" + ", ".join([*first, *rest]) + "]"


def _pattern_room(schema: Mapping[str, Any]) -> str:
    """A placeholder for a string with a pattern or format: about the length of a date-time and an identifier."""
    return "2024-01-01T00:00:00.000Z 01234567" if "pattern" in schema or "format" in schema else ""


def _count(value: Any) -> int:
    return min(value, 1000) if isinstance(value, int) else 0


def _resolve(reference: str, root: Any) -> Any:
    """The target of a `$ref` within the schema; True (any value) if there is none."""
    target = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        target = target.get(name, True) if isinstance(target, Mapping) else True
    return target
