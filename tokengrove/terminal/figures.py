"""Numbers, times and texts as short strings for table cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tokengrove.texts import printable

NONE = "-"
"""The text for a missing value."""

_AGES = ((86_400, "d"), (3600, "h"), (60, "m"))
_SCALES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))
_BARS = "▁▂▃▄▅▆▇█"


def age(seconds: float) -> str:
    """A time span in its largest unit: 5s, 3m, 2h, 4d. A negative span, from a clock that is behind, gives 0s."""
    for unit, name in _AGES:
        if seconds >= unit:
            return f"{int(seconds // unit)}{name}"
    return f"{max(0, int(seconds))}s"


def seconds(value: float | None) -> str:
    """A duration in seconds with three digits: 0.12 s, 350 s; in ms below a tenth of a second."""
    if value is None:
        return NONE
    return f"{value * 1000:.3g} ms" if value < 0.1 else f"{value:.3g} s" if value < 1000 else f"{value:.0f} s"


def count(value: float | None) -> str:
    """A count with at most four characters: 999, 1.2k, 12k, 3.4M."""
    if value is None:
        return NONE
    for scale, name in _SCALES:
        if value >= scale * 0.9995:
            scaled = value / scale
            return f"{scaled:.1f}{name}" if scaled < 9.95 else f"{scaled:.0f}{name}"
    return f"{value:.0f}"


def rate(value: float) -> str:
    """A number per second: two digits below ten, else as a count."""
    return count(value) if value >= 9.95 or value == 0 else f"{value:.2g}"


def number(value: float | None) -> str:
    """A reward, return or rate with three digits."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.3g}"


def one_line(text: str, most: int = 200) -> str:
    """A text that is safe to print: one line of at most `most` characters. A shortened text ends in `…`."""
    shown = printable(text[: 4 * most]).replace("\n", "↵")
    return shown if len(shown) <= most else f"{shown[: most - 1]}…"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """The last `width` values as bars from 0 to the highest; a space for a missing value."""
    shown = list(values)[-width:] if width > 0 else []
    highest = max((value for value in shown if value is not None), default=0.0)
    return "".join(_bar(value, highest) for value in shown)


def histogram(values: Sequence[float], width: int) -> str:
    """The distribution of `values`: bars for `width` equal parts of their range; one bar if all are equal."""
    if not values:
        return ""
    least, most = min(values), max(values)
    if least == most:
        return _BARS[-1]
    counts = [0] * width
    for value in values:
        # Halved, because the range of very large numbers would overflow.
        counts[min(width - 1, int((value / 2 - least / 2) / (most / 2 - least / 2) * width))] += 1
    return "".join(_bar(float(number), float(max(counts))) if number else " " for number in counts)


def _bar(value: float | None, highest: float) -> str:
    if value is None:
        return " "
    return _BARS[0] if highest <= 0 else _BARS[min(len(_BARS) - 1, max(0, round(value / highest * (len(_BARS) - 1))))]
