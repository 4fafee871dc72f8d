"""Small JSON schemas, for the arguments of tools that a request names by type alone."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def object_of(properties: Schema, *required: str) -> Schema:
    """An object with these properties."""
    return {"type": "object", "properties": properties, "required": list(required)}


def text(about: str) -> Schema:
    return {"type": "string", "description": about}


def texts(about: str) -> Schema:
    return {"type": "array", "items": {"type": "string"}, "description": about}


def integer(about: str) -> Schema:
    return {"type": "integer", "description": about}


def number(about: str) -> Schema:
    return {"type": "number", "description": about}


def numbers(about: str) -> Schema:
    """A list of integers, such as a point."""
    return {"type": "array", "items": {"type": "integer"}, "description": about}


def truth(about: str) -> Schema:
    return {"type": "boolean", "description": about}


def one_of(*values: str, about: str) -> Schema:
    return {"type": "string", "enum": list(values), "description": about}
