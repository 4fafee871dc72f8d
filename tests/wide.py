"""Parameters of which a quick run takes a few, each of other mechanics. `.ci/run` takes the rest (marker `wide`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

WIDE = pytest.mark.wide


def few(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The parameters: those in `quick` as they are, and the others marked. Each of `quick` must be one of them."""
    listed = list(values)
    assert all(any(each == value for value in listed) for each in quick), f"{quick} are not among {listed}"
    return [value if any(each == value for each in quick) else pytest.param(value, marks=WIDE) for value in listed]


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The parameters: the first ones as they are, and the others marked."""
    listed = list(values)
    return [*listed[:count], *(pytest.param(value, marks=WIDE) for value in listed[count:])]
