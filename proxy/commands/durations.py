"""Durations in flags: 30d, 12h, 90m or 3600s."""

from __future__ import annotations

from tokengrove.errors import ConfigurationError

_SECONDS = {"d": 86_400, "h": 3600, "m": 60, "s": 1}


def duration_s(text: str) -> float:
    """Convert a duration such as 30d, 12h, 90m or 3600s to seconds. Raises ConfigurationError."""
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in _SECONDS:
        raise ConfigurationError(
            f"--older-than {text!r} is not a duration; write a number and a unit: 30d, 12h, 90m or 3600s"
        )
    return float(int(number) * _SECONDS[unit])
