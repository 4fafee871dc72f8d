"""Durations in flags: 30d, 12h, 90m or 3600s."""

from __future__ import annotations

from tokengrove.errors import ConfigurationError

_SECONDS = {"d": 86_400.0, "h": 3600.0, "m": 60.0, "s": 1.0}


def seconds_of(text: str) -> float | None:
    """Return the seconds of a duration such as 30d, 12h, 90m or 3600s; None for any other text."""
    number, unit = text[:-1], text[-1:]
    return int(number) * _SECONDS[unit] if number.isdecimal() and unit in _SECONDS else None


def age_s(text: str) -> float:
    """Return the seconds of `--older-than`. Raises ConfigurationError."""
    if (seconds := seconds_of(text)) is None:
        raise ConfigurationError(
            f"--older-than {text!r} is not a duration; write a number and a unit: 30d, 12h, 90m or 3600s"
        )
    return seconds
