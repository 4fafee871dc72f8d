"""Reads the value of an option from JSON's types, by the type that its field is declared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokengrove.errors import ConfigurationError


def flag(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def read_value(name: str, declared: Any, value: Any) -> Any:
    """Return the value as the field has it. `declared` is the text of its type. Raises ConfigurationError."""
    if value is None and "None" in declared:
        return None
    if declared.startswith("tuple"):
        listed = list(value) if isinstance(value, list | tuple) else [value]
        return tuple(_scalar(name, "int" if "int" in declared else "str", each) for each in listed)
    if declared.startswith("Mapping"):
        if not isinstance(value, Mapping):
            raise ConfigurationError(f"{flag(name)} takes names with values, not {value!r}")
        return {str(key): _scalar(f"{name} {key}", "str", each) for key, each in value.items()}
    return _scalar(name, declared, value)


def _scalar(name: str, declared: str, value: Any) -> Any:
    if declared.startswith("bool"):
        fits, what = isinstance(value, bool), "true or false"
    elif declared.startswith("float"):
        fits, what = isinstance(value, int | float) and not isinstance(value, bool), "a number"
    elif declared.startswith("int"):
        fits, what = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    else:
        # `--agent-arg env=...` reads numbers as JSON, and a variable is a text in any case.
        fits, what = isinstance(value, str | int | float) and not isinstance(value, bool), "a text"
        value = str(value) if fits else value
    if not fits or (isinstance(value, str) and "\0" in value):
        raise ConfigurationError(f"{flag(name)} must be {what}, not {value!r}")
    return float(value) if declared.startswith("float") else value
