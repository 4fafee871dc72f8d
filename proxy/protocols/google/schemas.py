"""Translates schemas of Google's dialect of OpenAPI 3.0 into JSON schemas. A JSON schema stays as it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.protocols.fields import expect_list, expect_object, expect_str
from proxy.protocols.google.names import MOST_SHOWN, camel
from tokengrove.errors import InvalidRequest

_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_ONE = frozenset({"items", "additionalProperties"})
_LISTS = frozenset({"anyOf", "oneOf", "allOf"})
_NAMED = frozenset({"properties", "$defs"})
_COUNTS = frozenset({"minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties"})
_OTHER_NAMES = {"defs": "$defs", "ref": "$ref"}
_UNSPECIFIED = "type_unspecified"


def json_schema(value: Any, name: str) -> dict[str, Any]:
    """Return the JSON schema of a `Schema` at the path `name`: types in lower case, `nullable` as a type.

    `propertyOrdering` orders the properties. Raises InvalidRequest with the path of the field.
    """
    try:
        return _schema(value, name)
    except RecursionError:
        raise InvalidRequest(f"'{name}' is nested too deeply", param=name) from None


def _schema(value: Any, name: str) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for field, item in expect_object(value, name).items():
        key = _OTHER_NAMES.get(field) or camel(field)
        if item is not None:
            out[key] = _field(key, item, f"{name}.{field[:MOST_SHOWN]}")
    order = out.pop("propertyOrdering", None)
    if order is not None and isinstance(out.get("properties"), dict):
        out["properties"] = _ordered(out["properties"], order)
    if out.get("type") is None:
        out.pop("type", None)
    return _nullable(out) if out.pop("nullable", False) is True else out


def _field(key: str, item: Any, path: str) -> Any:
    """The value of a field of a JSON schema."""
    if key == "type":
        return [_type(each, path) for each in item] if isinstance(item, list) else _type(item, path)
    if key in _NAMED:
        return {name: _schema(each, f"{path}.{name[:MOST_SHOWN]}") for name, each in expect_object(item, path).items()}
    if key in _LISTS:
        return [_schema(each, f"{path}[{index}]") for index, each in enumerate(expect_list(item, path))]
    if key in _ONE and isinstance(item, Mapping):
        return _schema(item, path)
    if key in _COUNTS and isinstance(item, str) and item.isdecimal() and len(item) < 19:
        return int(item)  # JSON of protocol buffers has integers of 64 bits as texts
    return item


def _type(value: Any, path: str) -> str | None:
    kind = expect_str(value, path).lower()
    if kind == _UNSPECIFIED:
        return None
    if kind not in _TYPES:
        raise InvalidRequest(f"'{path}' must be one of {', '.join(sorted(_TYPES)).upper()}", param=path)
    return kind


def _ordered(properties: dict[str, Any], order: Any) -> dict[str, Any]:
    first = [name for name in order if isinstance(name, str) and name in properties] if isinstance(order, list) else []
    return {name: properties[name] for name in (*first, *properties)}


def _nullable(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema that also permits null."""
    if isinstance(kind := schema.get("type"), str):
        schema["type"] = [kind, "null"]
    elif "anyOf" in schema:
        schema["anyOf"] = [*schema["anyOf"], {"type": "null"}]
    if isinstance(schema.get("enum"), list) and None not in schema["enum"]:
        schema["enum"] = [*schema["enum"], None]
    return schema
