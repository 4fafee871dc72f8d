"""Parameters of which a quick run takes a few, each of other mechanics. `.ci/run` takes the rest (marker `wide`).

`TOKENGROVE_TEST_THIRD` (0, 1 or 2) selects a third of all collected tests by their names. Every test is in exactly one
third, and stays there as long as its name stays. Tests of one `xdist_group` are in the same third: they share what
takes minutes to make.
"""

from __future__ import annotations

import os
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import pytest

WIDE = pytest.mark.wide

CROSSED = pytest.mark.crossed
"""For a test whose lists of parameters are combined: a quick run takes each value of each list in some combination."""


def few(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """The parameters: those in `quick` as they are, and the others marked. Each of `quick` must be one of them."""
    listed = list(values)
    assert all(any(each == value for value in listed) for each in quick), f"{quick} are not among {listed}"
    return [value if any(each == value for each in quick) else pytest.param(value, marks=WIDE) for value in listed]


def first(values: Iterable[Any], count: int = 1) -> list[Any]:
    """The parameters: the first ones as they are, and the others marked."""
    listed = list(values)
    return [*listed[:count], *(pytest.param(value, marks=WIDE) for value in listed[count:])]


def mark_combinations(items: Iterable[pytest.Item]) -> None:
    """Mark the combinations of crossed tests that only repeat values: as many stay as the longest list has values."""
    families: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("crossed") and not item.get_closest_marker("wide"):
            families[item.nodeid.partition("[")[0]].append(item)
    for family in families.values():
        rows = [_row(item) for item in family]
        lists = [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]
        quick = {tuple(values[n % len(values)] for values in lists) for n in range(max(map(len, lists)))}
        for item, row in zip(family, rows, strict=True):
            if row not in quick:
                item.add_marker(WIDE)


def other_thirds(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """The tests that the chosen third leaves out; none unless `TOKENGROVE_TEST_THIRD` chooses one.

    Raises:
        pytest.UsageError: The variable is not 0, 1 or 2.
    """
    third = os.environ.get("TOKENGROVE_TEST_THIRD")
    if not third:
        return []
    if third not in ("0", "1", "2"):
        raise pytest.UsageError(f"TOKENGROVE_TEST_THIRD must be 0, 1 or 2, not {third!r}")
    return [item for item in items if zlib.crc32(_unit(item).encode()) % 3 != int(third)]


def _unit(item: pytest.Item) -> str:
    group = item.get_closest_marker("xdist_group")
    return group.args[0] if group else item.nodeid


def _row(item: pytest.Item) -> tuple[tuple[int, ...], ...]:
    """What identifies the entry that a test has of each list of parameters."""
    values: Mapping[str, Any] = item.callspec.params  # type: ignore[attr-defined]
    marks = [mark.args[0] for mark in item.iter_markers("parametrize")]
    named = [names.replace(",", " ").split() if isinstance(names, str) else list(names) for names in marks]
    named += [[name] for name in values if not any(name in names for names in named)]
    return tuple(tuple(id(values[name]) for name in names) for names in named)
