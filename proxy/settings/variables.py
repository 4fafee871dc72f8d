"""Settings from flags and TOKENGROVE_* variables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from proxy.errors import ConfigurationError
from proxy.settings.settings import Settings
from proxy.types import Credit

VARIABLE_PREFIX = "TOKENGROVE_"


def from_environment(given: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Settings:
    """Read settings from flags (None: not given) and environment variables.

    Raises ConfigurationError that names the flag or variable.
    """
    hints = get_type_hints(Settings)
    values: dict[str, Any] = {}
    for spec in fields(Settings):
        if given.get(spec.name) not in (None, ()):
            values[spec.name] = given[spec.name]
        elif (text := environ.get(VARIABLE_PREFIX + spec.name.upper())) is not None:
            values[spec.name] = _parse(spec.name, text, hints[spec.name])
    return Settings(**values)


def _parse(name: str, text: str, kind: Any) -> Any:
    parse, expected = _PARSERS.get(kind, (str, "text"))
    try:
        return parse(text)
    except (ValueError, KeyError):
        raise ConfigurationError(f"{VARIABLE_PREFIX}{name.upper()}={text!r} is not {expected}") from None


def _parse_bool(text: str) -> bool:
    return {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}[text.lower()]


def _parse_list(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(";") if part)


_BOOL = (_parse_bool, "true or false (1, true, yes, 0, false, no)")
_INT = (int, "an integer")
_FLOAT = (float, "a number")
_PARSERS: Mapping[Any, tuple[Callable[[str], Any], str]] = {
    bool: _BOOL,
    bool | None: _BOOL,
    int: _INT,
    int | None: _INT,
    float: _FLOAT,
    float | None: _FLOAT,
    Credit: (Credit, " or ".join(Credit)),
    tuple[str, ...]: (_parse_list, "a list separated by semicolons"),
}
