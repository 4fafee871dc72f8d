"""Dataclasses made of sections of a configuration, with errors that name a field by its whole path."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from tokengrove.errors import InvalidRequest

T = TypeVar("T")
_NEAR = 0.75
"""The similarity, from 0 to 1, at which a name counts as misspelt."""
_WORDS = {int: "an integer", float: "a number", bool: "true or false", str: "a text", dict: "a mapping"}


def made(cls: type[T], section: Any, path: str, *, ignored: Iterable[str] = ()) -> T:
    """An instance of the dataclass `cls` with the values of `section` (a mapping, another dataclass, or a `cls`).

    `ignored`: names that the section may also have, without effect. Null means a field's default if the field cannot be
    null. Raises InvalidRequest for an unknown name and for a value of the wrong type.
    """
    if isinstance(section, cls):
        return section
    values = as_mapping(section, path)
    hints = get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls) if field.init}  # type: ignore[arg-type]
    check_names(values, fields, path, ignored=ignored)
    given = {name: checked(value, fields[name], f"{path}.{name}") for name, value in values.items() if name in fields}
    return cls(**{name: value for name, value in given.items() if value is not None or _nullable(fields[name])})


def as_mapping(section: Any, path: str) -> Mapping[str, Any]:
    """The fields of a section; {} for None. Raises InvalidRequest for a value without fields."""
    if section is None:
        return {}
    if isinstance(section, Mapping):
        return section
    if dataclasses.is_dataclass(section) and not isinstance(section, type):
        return {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    raise InvalidRequest(f"{path} must be a mapping, not {section!r}", param=path)


def check_names(values: Mapping[str, Any], known: Iterable[str], path: str, *, ignored: Iterable[str] = ()) -> None:
    """Raise InvalidRequest for a name that is neither `known` nor `ignored`, with the nearest of these."""
    allowed = [*known, *ignored]
    for name in values:
        if name not in allowed:
            hint = nearest(str(name), allowed)
            raise InvalidRequest(f"{path} has no setting {name!r}{hint or _listed(known)}", param=f"{path}.{name}")


def check_near(
    values: Mapping[Any, Any], known: Iterable[str], path: str, *, beside: Iterable[str] = (), cutoff: float = _NEAR
) -> None:
    """Raise InvalidRequest for a name that is close to a `known` one, but neither `known` nor in `beside`.

    For sections in which users have their own names: other unknown names are accepted.
    """
    known = tuple(known)
    allowed = {*known, *beside}
    for name in values:
        if name not in allowed and (near := get_close_matches(str(name), known, 1, cutoff)):
            raise InvalidRequest(
                f"{path} has {name!r}, which nothing reads; did you mean {near[0]!r}?", param=f"{path}.{name}"
            )


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` if a known name is close, else an empty text."""
    near = get_close_matches(name, list(known), 1, _NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def checked(value: Any, hint: Any, path: str) -> Any:
    """`value`, if it has the type `hint`. Integers are also numbers. Raises InvalidRequest for other values."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if value is None:
        return None
    for kind in kinds:
        if kind is Any:
            return value
        origin = get_origin(kind) or kind
        if dataclasses.is_dataclass(origin) and isinstance(origin, type):
            return made(origin, value, path)
        if origin is list and isinstance(value, list | tuple):
            (item,) = get_args(kind)
            return [checked(each, item, f"{path}[{at}]") for at, each in enumerate(value)]
        if origin is dict and isinstance(value, Mapping):
            return dict(value)
        if origin is bool and isinstance(value, bool):
            return value
        if origin in (int, float) and isinstance(value, int | float) and not isinstance(value, bool):
            if origin is float:
                return value
            if float(value).is_integer():
                return int(value)
        if origin is str and isinstance(value, str):
            return value
    raise InvalidRequest(f"{path} must be {' or '.join(map(_word, kinds))}, not {value!r}", param=path)


def _word(kind: Any) -> str:
    if kind is NoneType:
        return "null"
    origin = get_origin(kind) or kind
    if origin is list:
        return f"a list, each {_word(get_args(kind)[0])}"
    return _WORDS.get(origin, "a mapping")


def _nullable(hint: Any) -> bool:
    return hint is Any or NoneType in get_args(hint)


def _listed(known: Iterable[str]) -> str:
    return f"; it has {', '.join(known)}"
