"""Converts arguments written as plain text to JSON, typed by the tool's JSON schema.

A parameter that can only be a string is the unchanged text, even if it looks like another type.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from proxy.rendering.tool_calls.json_calls import loads
from proxy.rendering.tool_calls.tool_format import schema_of
from proxy.types import Tool

_ALL = frozenset({"string", "number", "integer", "boolean", "null", "object", "array"})

# Templates that write Python's `str` of a value spell these words this way: word -> JSON type, JSON text.
_PYTHON = {"True": ("boolean", "true"), "False": ("boolean", "false"), "None": ("null", "null")}


class ParameterTypes:
    """Looks up the JSON types of parameters in the tools of one request."""

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tools = {tool.name: tool for tool in tools}

    def of(self, tool: str, parameter: str) -> frozenset[str]:
        """Return the names of the JSON types that the parameter may have; all of them if the schema has no type."""
        found = self._tools.get(tool)
        if found is None:
            return _ALL
        properties = schema_of(found).get("properties")
        schema = properties.get(parameter) if isinstance(properties, Mapping) else None
        return _allowed(schema, schema_of(found))


def is_text(types: frozenset[str]) -> bool:
    """Return whether a parameter of these types may only be a string."""
    return types == {"string"}


def json_of(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value written as `text`: unchanged if it is JSON of an allowed type, else a string.

    JSON of another type also stays unchanged unless a string is allowed, so that the agent sees the wrong argument.
    """
    if is_text(types):
        return string_of(text)
    bare = text.strip()
    spelled = _PYTHON.get(bare)
    if spelled is not None and spelled[0] in types and types != _ALL:
        return spelled[1]
    value = loads(bare)
    if value is None and bare != "null":
        return string_of(text)
    return string_of(text) if "string" in types and _type_of(value) not in types else bare


def string_of(text: str) -> str:
    """Return `text` as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    return "string" if isinstance(value, str) else "object" if isinstance(value, dict) else "array"


def _allowed(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > 8:
        return _ALL
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        return _allowed(_resolve(reference, root), root, depth + 1)
    for key in ("anyOf", "oneOf"):
        branches = schema.get(key)
        if isinstance(branches, list) and branches:
            return frozenset().union(*(_allowed(branch, root, depth + 1) for branch in branches))
    return _declared(schema)


def _declared(schema: Mapping[str, Any]) -> frozenset[str]:
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    if not names and isinstance(schema.get("enum"), list):
        names = [_type_of(value) for value in schema["enum"]]
    if not names and "const" in schema:
        names = [_type_of(schema["const"])]
    if not names and isinstance(schema.get("properties"), Mapping):
        names = ["object"]
    types = {name for name in names if isinstance(name, str)} & _ALL
    if "number" in types:
        types.add("integer")
    return frozenset(types) or _ALL


def _resolve(reference: str, root: Mapping[str, Any]) -> Any:
    found: Any = root
    for step in reference[2:].split("/"):
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, Mapping) else None
    return found
