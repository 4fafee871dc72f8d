"""`--engine-arg key=value` options: parsing, shared by all engines."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence

from tokengrove.errors import ConfigurationError

_FEW = 20
"""The maximum number of options that an error lists in full."""


def parse_arguments(arguments: Sequence[str]) -> dict[str, str]:
    """Parse `key=value` texts. The last value of a key takes precedence. Raises ConfigurationError."""
    values = {}
    for argument in arguments:
        key, mark, value = argument.partition("=")
        if not (key and mark):
            raise ConfigurationError(f"--engine-arg {argument} must have the form key=value")
        values[key] = value
    return values


def check_known(keys: Iterable[str], known: Iterable[str], engine: str) -> None:
    """Raise ConfigurationError for the first of `keys` that is not in `known`. `engine`: the owner of the options."""
    names = sorted(known)
    for key in sorted(set(keys) - set(names)):
        raise ConfigurationError(f"--engine-arg {key}: {engine} has no option '{key}'; {_instead(key, names)}")


def _instead(key: str, names: Sequence[str]) -> str:
    if len(names) <= _FEW:
        return f"its options are {', '.join(names)}" if names else "it has no options"
    near = difflib.get_close_matches(key, names, 1)
    return f"did you mean {near[0]}?" if near else f"it has {len(names)} others"


def seconds(key: str, text: str) -> float:
    """The value of `--engine-arg KEY=TEXT` in seconds, finite and at least 0. Raises ConfigurationError."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigurationError(f"--engine-arg {key}={text}: the value must be a number of seconds, at least 0")
    return number
