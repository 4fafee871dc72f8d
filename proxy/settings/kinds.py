"""Conversion of settings from variables and configuration files, and their masked form."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from proxy.settings.settings import Settings
from tokengrove.errors import ConfigurationError
from tokengrove.options.option import Option, options_of
from tokengrove.options.values import read_text, read_value

_ARGUMENT_KEY = re.compile(r"^(\w*key=).+", re.DOTALL)
_TABLE_KEY = re.compile(r'("key":\s*")(?:[^"\\]|\\.)*(?=")')
_PASSWORD = re.compile(r"(?<=//)([^:/@]*:).*(?=@)|([?&](?:ssl)?password=)[^&]*")
SETTINGS = options_of(Settings)


def read_variable(variable: str, text: str, setting: Option) -> Any:
    """The value of a setting from the text of a variable. Raises ConfigurationError naming the variable."""
    try:
        return read_text(setting, text)
    except ValueError as error:
        raise ConfigurationError(f"{variable}={text!r} is not {error}") from None


def convert(source: str, value: Any, setting: Option) -> Any:
    """The value of a setting from a TOML value. Raises ConfigurationError naming `source`."""
    try:
        return read_value(setting, value)
    except ValueError as error:
        raise ConfigurationError(f"{source} must be {error}") from None


def convert_named(given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of settings, from Python, JSON or TOML values by name. Raises ConfigurationError naming the setting.

    A single text may replace a list of one. `prefix`: a prefix of the name in errors.
    """
    values = {}
    for name, value in given.items():
        if name not in SETTINGS:
            raise ConfigurationError(f"{prefix}{name} is no setting of the server{did_you_mean(name, SETTINGS)}")
        alone = SETTINGS[name].repeats and isinstance(value, str)
        values[name] = convert(f"{prefix}{name}", [value] if alone else value, SETTINGS[name])
    return values


def masked(name: str, value: Any) -> Any:
    """The value of a setting with keys and passwords masked."""
    if isinstance(value, tuple):
        return tuple(_ARGUMENT_KEY.sub(r"\1***", part) for part in value)
    if name == "database_url":
        return _PASSWORD.sub(lambda found: f"{found[1] or found[2]}***", value)
    if name == "models":
        return _TABLE_KEY.sub(r"\1***", value or "") or value
    return "***" if value and SETTINGS[name].about.get("secret") else value


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`; did you mean X?` if there is a similar name, else ""."""
    from difflib import get_close_matches

    near = get_close_matches(name, [*known], 1)
    return f"; did you mean {near[0]}?" if near else ""
