"""Read the value of an option from text, as variables have it, or from a value of JSON, TOML or YAML.

Both raise ValueError whose text says what the option takes; the caller says where the value stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Literal, get_args, get_origin

from tokengrove.options.option import Option

_BOOLS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


def read_text(option: Option, text: str) -> Any:
    """The value that a text stands for. A list is separated by semicolons."""
    kind = option.kind
    if kind is bool:
        if text.lower() not in _BOOLS:
            raise ValueError("true or false (1, true, yes, 0, false, no)")
        return _BOOLS[text.lower()]
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(_EXPECTED[kind]) from None
    if get_origin(kind) is tuple:
        return tuple(part for part in text.split(";") if part)
    return _one(kind, text)


def read_value(option: Option, value: Any, *, numbers: bool = False) -> Any:
    """The value as the option's type has it: a tuple of a list. `numbers`: a number is also a text."""
    kind, origin = option.kind, get_origin(option.kind)
    if origin is tuple:
        return tuple(_items(get_args(kind)[0], value, numbers))
    if origin is Mapping:
        return {str(key): _one(get_args(kind)[1], each, numbers) for key, each in _mapping(value).items()}
    return _one(kind, value, numbers)


def _one(kind: Any, value: Any, numbers: bool = False) -> Any:
    if kind is Any:
        return value
    if numbers and kind is str and type(value) in (int, float):
        return str(value)
    if kind is float and type(value) is int:
        return float(value)
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        if value not in list(kind):
            raise ValueError(" or ".join(kind))
        return kind(value)
    if get_origin(kind) is Literal:
        kind = str
    if type(value) is not kind or (kind is str and "\0" in value):
        raise ValueError(_EXPECTED[kind])
    return value


def _items(kind: Any, value: Any, numbers: bool) -> list[Any]:
    try:
        return [_one(kind, each, numbers) for each in _of_list(value)]
    except ValueError:
        raise ValueError(f"a list, each {_EXPECTED[kind]}") from None


def _of_list(value: Any) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError
    return value


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError("a mapping")
    return value


_EXPECTED = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
