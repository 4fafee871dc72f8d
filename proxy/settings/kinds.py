"""The kinds of values that settings have, and how each is read from a variable or a configuration file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from proxy.settings.settings import Settings
from proxy.types import Credit
from tokengrove.errors import ConfigurationError

_ARGUMENT_KEY = re.compile(r"^(\w*key=).+", re.DOTALL)
_PASSWORD = re.compile(r"(?<=//)([^:/@]*:).*(?=@)|([?&](?:ssl)?password=)[^&]*")
KINDS: Mapping[str, Any] = get_type_hints(Settings)
"""The type of each setting by its name."""
_SECRETS = {spec.name for spec in fields(Settings) if spec.metadata["secret"]}


def parse(source: str, text: str, kind: Any) -> Any:
    """The value that the text of a variable stands for. Raises ConfigurationError naming `source`."""
    read, expected = _TEXTS.get(kind, (str, "text"))
    try:
        return read(text)
    except (ValueError, KeyError):
        raise ConfigurationError(f"{source}={text!r} is not {expected}") from None


def convert(source: str, value: Any, kind: Any) -> Any:
    """The value of a setting from one of TOML. Raises ConfigurationError naming `source`."""
    read, expected = _VALUES.get(kind, (_text, "text in quotes"))
    try:
        return read(value)
    except ValueError:
        raise ConfigurationError(f"{source} must be {expected}") from None


def convert_named(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of settings by name, as Python, JSON or TOML has them. Raises ConfigurationError naming the setting.

    `prefix`: stands before the name in errors.
    """
    return {name: _convert_named(name, value, prefix) for name, value in given.items()}


def _convert_named(name: str, value: Any, prefix: str) -> Any:
    if name not in KINDS:
        raise ConfigurationError(f"{prefix}{name} is no setting of the server{did_you_mean(name, KINDS)}")
    if KINDS[name] == tuple[str, ...]:
        value = [value] if isinstance(value, str) else list(value)  # one is enough for most
    return convert(f"{prefix}{name}", value, KINDS[name])


def masked(name: str, value: Any) -> Any:
    """A setting's value without keys and passwords."""
    if isinstance(value, tuple):
        return tuple(_ARGUMENT_KEY.sub(r"\1***", part) for part in value)
    if name == "database_url":
        return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}***", value)
    return "***" if value and name in _SECRETS else value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` if there is a similar name, else nothing."""
    from difflib import get_close_matches

    near = get_close_matches(name, [*known], 1)
    return f"; did you mean {near[0]}?" if near else ""


def _parse_bool(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(";") if part)


_TEXT_BOOL = (_parse_bool, "true or false (1, true, yes, 0, false, no)")
_TEXT_INT = (int, "an integer")
_TEXT_FLOAT = (float, "a number")
_TEXTS: Mapping[Any, tuple[Callable[[str], Any], str]] = {
    bool: _TEXT_BOOL,
    bool | None: _TEXT_BOOL,
    int: _TEXT_INT,
    int | None: _TEXT_INT,
    float: _TEXT_FLOAT,
    float | None: _TEXT_FLOAT,
    Credit: (Credit, " or ".join(Credit)),
    tuple[str, ...]: (_parse_list, "a list separated by semicolons"),
}


def _of(*types: type) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if type(value) not in types:
            raise ValueError
        return value

    return read


_text = _of(str)


def _number(value: Any) -> float:
    return float(_of(int, float)(value))


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, _of(list)(value)))


_BOOL = (_of(bool), "true or false")
_INT = (_of(int), "an integer")
_FLOAT = (_number, "a number")
_VALUES: Mapping[Any, tuple[Callable[[Any], Any], str]] = {
    bool: _BOOL,
    bool | None: _BOOL,
    int: _INT,
    int | None: _INT,
    float: _FLOAT,
    float | None: _FLOAT,
    Credit: (Credit, " or ".join(f'"{credit}"' for credit in Credit)),
    tuple[str, ...]: (_texts, 'a list such as ["key=value"]'),
}
