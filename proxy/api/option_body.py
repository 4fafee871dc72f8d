"""Reads the options of a body (`tokengrove.options`). Errors name the field at fault and its allowed values.

A field that is null counts as absent. Only given fields are read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import is_dataclass
from enum import StrEnum
from typing import Any, Literal, TypeVar, get_args, get_origin

from proxy.api.known_fields import check_known
from proxy.protocols.fields import (
    check_text,
    expect_bool,
    expect_list,
    expect_object,
    expect_str,
    json_type,
    optional_float,
    optional_int,
)
from proxy.store.session_query import Wanted
from tokengrove.errors import InvalidRequest
from tokengrove.options.export import TurnSelection
from tokengrove.options.option import Conditions, NumberCondition, Option, options_of

_T = TypeVar("_T")
_EnumT = TypeVar("_EnumT", bound=StrEnum)
_FAR = sys.float_info.max
_MAX_INT = 2**31 - 1
_RANGE = ("min", "max")


def read_given(body: Mapping[str, Any], options: Mapping[str, Option], at: str = "") -> dict[str, Any]:
    """The values of the options in a body. `at`: the path of the body, with its dot. Raises InvalidRequest."""
    check_known({name: value for name, value in body.items() if at or value is not None}, options, at)
    return {name: _read(value, options[name], at + name) for name, value in body.items() if value is not None}


def made_of(group: type[_T], given: Mapping[str, Any]) -> _T:
    """The group, built from the given values that belong to it."""
    return group(**{name: given[name] for name in options_of(group) if name in given})


def read_group(group: type[_T], body: Mapping[str, Any], at: str = "") -> _T:
    """The group whose options are the fields of a body."""
    return group(**read_given(body, options_of(group), at))


def read_choice(value: Any, choices: type[_EnumT], path: str) -> _EnumT:
    """The enum member that a word names."""
    if isinstance(value, str):
        with suppress(ValueError):
            return choices(value)
    raise InvalidRequest(f"'{path}' must be one of {', '.join(choices)}", param=path)


def read_wanted(value: Any, path: str) -> Wanted:
    """A condition: a value, a list of values, or a range."""
    if not isinstance(value, dict):
        return Wanted(tuple(value)) if isinstance(value, list) and value else Wanted((value,))
    check_known(value, _RANGE, f"{path}.")
    least, most = (optional_float(value, end, least=-_FAR, most=_FAR, at=f"{path}.") for end in _RANGE)
    if least is None and most is None:
        message = f"'{path}' is an object without 'min' and 'max': give a value, a list or a range"
        raise InvalidRequest(message, param=path)
    return Wanted(least=least, most=most)


def _read(value: Any, option: Option, path: str) -> Any:
    kind = option.kind
    if (reader := _READERS.get(kind)) is not None:
        return reader(value, option, path)
    if is_dataclass(kind):
        return read_group(kind, expect_object(value, path), f"{path}.")  # type: ignore[arg-type]
    if get_origin(kind) is tuple:  # of groups
        items = enumerate(expect_list(value, path))
        group = get_args(kind)[0]
        return tuple(
            read_group(group, expect_object(each, f"{path}[{index}]"), f"{path}[{index}].") for index, each in items
        )
    if get_origin(kind) is frozenset:
        return _names(value, option, path)
    return _text(value, option, path) if get_origin(kind) is Literal else read_choice(value, kind, path)


def _checked(value: _T, option: Option, path: str) -> _T:
    """The value. Raises InvalidRequest for one out of its bounds, or none of its words."""
    if (fault := option.fault(value)) is not None:
        raise InvalidRequest(f"'{path}' {fault}", param=path)
    return value


def _number(value: Any, option: Option, path: str) -> float:
    if "unit" in option.about and (isinstance(value, bool) or not isinstance(value, int | float)):
        message = f"'{path}' must be a number of {option.about['unit']}, not {json_type(value)}"
        raise InvalidRequest(message, param=path)
    return _checked(optional_float({path: value}, path, least=-_FAR, most=_FAR) or 0.0, option, path)


def _integer(value: Any, option: Option, path: str) -> int:
    return _checked(optional_int({path: value}, path, least=-_MAX_INT, most=_MAX_INT) or 0, option, path)


def _text(value: Any, option: Option, path: str) -> str:
    return _checked(check_text(expect_str(value, path), path), option, path)


def _texts(value: Any, option: Option, path: str) -> tuple[str, ...]:
    items = enumerate(expect_list(value, path))
    return tuple(check_text(expect_str(item, f"{path}[{index}]"), path) for index, item in items)


def _names(value: Any, option: Option, path: str) -> frozenset[str]:
    """A string or a list of strings, as a set of what the option's type makes of them."""
    values = [value] if isinstance(value, str) else expect_list(value, path)
    for each in values:
        check_text(expect_str(each, path), path)
        if option.choices and each not in option.choices:
            raise InvalidRequest(f"'{path}' must contain only {', '.join(option.choices)}", param=path)
    return frozenset(map(get_args(option.kind)[0], values))


def _turns(value: Any, option: Option, path: str) -> TurnSelection | frozenset[int]:
    if isinstance(value, list):
        for index in value:
            if type(index) is not int or not 0 <= index <= _MAX_INT:
                raise InvalidRequest(f"'{path}' must contain indexes of turns, which count from 0", param=path)
        return frozenset(value)
    if not isinstance(value, str) or value not in list(TurnSelection):
        raise InvalidRequest(f"'{path}' must be all, last or a list of turn indexes", param=path)
    return TurnSelection(value)


def _bool_or_auto(value: Any, option: Option, path: str) -> bool | Literal["auto"]:
    if not isinstance(value, bool) and value != "auto":
        raise InvalidRequest(f"'{path}' must be true, false or \"auto\"", param=path)
    return value if isinstance(value, bool) else "auto"


def _conditions(value: Any, option: Option, path: str) -> dict[str, Wanted]:
    return {key: read_wanted(each, f"{path}.{key}") for key, each in expect_object(value, path).items()}


def _number_condition(value: Any, option: Option, path: str) -> Wanted:
    wanted = read_wanted(value, path)
    for each in wanted.choices:
        if isinstance(each, bool) or not isinstance(each, int | float) or not -(2**63) <= each < 2**63:
            raise InvalidRequest(f"'{path}' must be a number, a list of numbers or a range", param=path)
    return wanted


def _object(value: Any, option: Option, path: str) -> Mapping[str, Any]:
    return expect_object(value, path)


def _text_object(value: Any, option: Option, path: str) -> Mapping[str, str]:
    return {
        key: check_text(expect_str(each, f"{path}.{key}"), path) for key, each in expect_object(value, path).items()
    }


_READERS: Mapping[Any, Callable[[Any, Option, str], Any]] = {
    bool: lambda value, option, path: expect_bool(value, path),
    int: _integer,
    float: _number,
    str: _text,
    tuple[str, ...]: _texts,
    Mapping[str, Any]: _object,
    Mapping[str, str]: _text_object,
    Conditions: _conditions,
    NumberCondition: _number_condition,
    TurnSelection | frozenset[int]: _turns,
    bool | Literal["auto"]: _bool_or_auto,
}
