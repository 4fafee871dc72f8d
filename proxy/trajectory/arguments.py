"""Compare the arguments of tool calls as values: equal JSON, or equal but for null defaults that a client filled in."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from proxy.trajectory.matching import argument_value, canonical_arguments


class Fit(IntEnum):
    """How echoed arguments compare with the sampled arguments."""

    EQUAL = 0
    NULLS_ADDED = 1  # the echo has more keys, each null and optional in the schema
    DIFFERENT = 2


def compare_arguments(ours: str, theirs: str, schema: Mapping[str, Any]) -> Fit:
    """Compare two JSON texts of arguments. `schema`: the schema of the tool's parameters."""
    if ours == theirs or canonical_arguments(ours) == canonical_arguments(theirs):
        return Fit.EQUAL
    try:
        filled = _is_filled(argument_value(ours or "{}"), argument_value(theirs), [schema], schema)
    except (ValueError, RecursionError):
        return Fit.DIFFERENT
    return Fit.NULLS_ADDED if filled else Fit.DIFFERENT


def _is_filled(ours: Any, theirs: Any, schemas: list[Any], root: Mapping[str, Any]) -> bool:
    """Return whether `theirs` is `ours` plus nulls, at any depth, for keys that one of `schemas` makes optional."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        objects = _alternatives(schemas, root)
        if ours.keys() - theirs.keys():
            return False
        return all(
            _is_filled(ours[key], value, [_mapping(one.get("properties")).get(key) for one in objects], root)
            if key in ours
            else value is None and any(_is_optional(key, one) for one in objects)
            for key, value in theirs.items()
        )
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        items = [one.get("items") for one in _alternatives(schemas, root)]
        return all(_is_filled(own, other, items, root) for own, other in zip(ours, theirs, strict=True))
    return type(ours) is type(theirs) and (bool(ours == theirs) or (ours != ours and theirs != theirs))  # NaN


def _is_optional(key: str, schema: Mapping[str, Any]) -> bool:
    required = schema.get("required")
    return key in _mapping(schema.get("properties")) and not (isinstance(required, list) and key in required)


def _alternatives(schemas: list[Any], root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the schemas and all schemas that they refer to or combine, each once."""
    found: dict[int, Mapping[str, Any]] = {}
    open_schemas = list(schemas)
    while open_schemas:
        schema = open_schemas.pop()
        if not isinstance(schema, Mapping) or id(schema) in found:
            continue
        found[id(schema)] = schema
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            open_schemas.append(_referred(reference, root))
        for name in ("anyOf", "oneOf", "allOf"):
            options = schema.get(name)
            open_schemas += options if isinstance(options, list) else ()
    return list(found.values())


def _referred(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the value at a JSON pointer like `#/$defs/Name`, or None."""
    found: Any = root
    for part in reference.removeprefix("#").strip("/").split("/"):
        found = _mapping(found).get(part.replace("~1", "/").replace("~0", "~")) if part else found
    return found


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
