"""Type and range checks for fields of a decoded JSON body.

Each function returns the checked value, or raises InvalidRequest, with the field's path in its message and `param`.
In the `optional_*` functions, `at` is the path of `body` with its trailing dot, such as "sampling_params.".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.types import Ids, ids_of
from tokengrove.errors import InvalidRequest


def expect_object(value: Any, name: str) -> Mapping[str, Any]:
    """Return `value` if it is a JSON object."""
    if not isinstance(value, dict):
        raise InvalidRequest(f"'{name}' must be an object, not {json_type(value)}", param=name)
    return value


def expect_list(value: Any, name: str) -> list[Any]:
    """Return `value` if it is a JSON array."""
    if not isinstance(value, list):
        raise InvalidRequest(f"'{name}' must be an array, not {json_type(value)}", param=name)
    return value


def expect_str(value: Any, name: str) -> str:
    """Return `value` if it is a string."""
    if not isinstance(value, str):
        raise InvalidRequest(f"'{name}' must be a string, not {json_type(value)}", param=name)
    return value


def expect_bool(value: Any, name: str) -> bool:
    """Return `value` if it is a boolean."""
    if not isinstance(value, bool):
        raise InvalidRequest(f"'{name}' must be true or false, not {json_type(value)}", param=name)
    return value


def optional_bool(body: Mapping[str, Any], name: str, default: bool = False, at: str = "") -> bool:
    """Return a boolean field, or `default` if it is absent or null."""
    value = body.get(name)
    return default if value is None else expect_bool(value, at + name)


def optional_object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return an object field, or an empty object if it is absent or null."""
    value = body.get(name)
    return {} if value is None else expect_object(value, name)


def optional_str(body: Mapping[str, Any], name: str, at: str = "") -> str | None:
    """Return a string field, or None if it is absent or null."""
    value = body.get(name)
    return None if value is None else expect_str(value, at + name)


def optional_text(body: Mapping[str, Any], name: str, at: str = "") -> str | None:
    """Return a string field that goes to the database (see `check_text`), or None if it is absent or null."""
    text = optional_str(body, name, at)
    return None if text is None else check_text(text, at + name)


def check_text(text: str, name: str) -> str:
    """Return `text` if every database accepts it. NUL is refused: PostgreSQL can neither store nor compare it."""
    if "\0" in text:
        raise InvalidRequest(f"'{name}' must not hold a NUL character", param=name)
    return text


def expect_text(value: Any, name: str) -> str:
    """Return `value` if it is a string that every database accepts."""
    return check_text(expect_str(value, name), name)


def optional_int(body: Mapping[str, Any], name: str, *, least: int, most: int = 2**31 - 1, at: str = "") -> int | None:
    """Return an integer field between `least` and `most` (both included), or None if it is absent or null.

    A number such as 5.0 counts as an integer.
    """
    value, name = body.get(name), at + name
    if value is None:
        return None
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequest(f"'{name}' must be an integer, not {json_type(value)}", param=name)
    if not least <= value <= most:
        raise InvalidRequest(f"'{name}' must be between {least} and {most}, not {value}", param=name)
    return value


def optional_float(body: Mapping[str, Any], name: str, *, least: float, most: float, at: str = "") -> float | None:
    """Return a number field between `least` and `most` (both included), or None if it is absent or null."""
    value, name = body.get(name), at + name
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidRequest(f"'{name}' must be a number, not {json_type(value)}", param=name)
    if not least <= value <= most:
        raise InvalidRequest(f"'{name}' must be between {least:g} and {most:g}, not {value}", param=name)
    return float(value)


def parse_token_ids(value: Any, name: str) -> Ids:
    """Parse a list of at least one token id. Raises InvalidRequest naming it."""
    values = expect_list(value, name)
    try:
        if bool in map(type, values):  # an array would store them as 0 and 1
            raise TypeError
        ids = ids_of(values)
    except (TypeError, OverflowError):
        bad = next((item for item in values if isinstance(item, bool) or not isinstance(item, int)), None)
        shown = json_type(bad) if bad is not None else "a number beyond 31 bits"
        raise InvalidRequest(f"'{name}' must be a list of token ids, but it holds {shown}", param=name) from None
    if not ids or min(ids) < 0:
        raise InvalidRequest(f"'{name}' must hold at least one token id, and no negative ones", param=name)
    return ids


def json_type(value: Any) -> str:
    """Return the JSON name of a value's type, with its article, for error messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    names = {str: "a string", int: "a number", float: "a number", list: "an array", dict: "an object"}
    return names.get(type(value), type(value).__name__)
