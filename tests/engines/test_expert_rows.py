"""Rows of experts by cache slot, and those of one request that wait for its next token."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxy.engine.transformers.batching import StepEntry
from proxy.engine.transformers.expert_rows import ExpertRows, PendingExperts


class Batch:
    """A batch of eight slots in which each request has the slots that it is given; None: no prefix is shared."""

    def __init__(self, **slots: list[int] | None) -> None:
        self._slots, self.slot_count = slots, 8

    def slots(self, serial: str, first: int, count: int) -> Any:
        slots = self._slots[serial]
        return None if slots is None else np.array(slots[first : first + count], np.int64)


class Hooks:
    """Gives the rows of one step after the other; None: they are not known."""

    def __init__(self, *steps: list[int] | None) -> None:
        self._steps = iter(steps)

    def take(self, tokens: int) -> Any:
        step = next(self._steps)
        assert step is None or len(step) == tokens
        return None if step is None else rows(*step)


def rows(*values: int) -> Any:
    """Rows of one layer and one expert."""
    return np.array(values, np.uint8).reshape(-1, 1, 1)


def entry(serial: str, first: int, processed: int) -> StepEntry:
    return StepEntry(serial, processed, True, first)


def values(column: Any) -> Any:
    return column.start, column.rows.values[:, 0, 0].tolist()


def test_a_cached_prefix_has_the_rows_of_the_pass_that_wrote_its_slots() -> None:
    kept = ExpertRows(Hooks([1, 2, 3, 9], [4]), Batch(a=[4, 5, 6], b=[7], c=[4, 5, 0]))  # type: ignore[arg-type]
    kept.take([entry("a", 0, 3), entry("b", 0, 1)])
    found = kept.take([entry("c", 2, 1)])
    pending = PendingExperts(1)
    pending.add(kept, entry("c", 2, 1), found)
    assert values(pending.take()) == (1, [2, 4])
    assert pending.take() is None


def test_a_slot_whose_pass_is_not_known_has_no_row() -> None:
    kept = ExpertRows(Hooks([1, 2], None), Batch(a=[0, 1], b=[1]))  # type: ignore[arg-type]
    kept.take([entry("a", 0, 2)])
    kept.take([entry("b", 0, 1)])
    cached = kept.cached("a", 0, 2)
    assert cached is not None and cached.missing.tolist() == [False, True]
    kept.forget()
    cached = kept.cached("a", 0, 2)
    assert cached is not None and cached.missing.all()


def test_without_shared_prefixes_nothing_is_kept() -> None:
    kept = ExpertRows(Hooks([1, 2]), Batch(a=None))  # type: ignore[arg-type]
    assert kept.take([entry("a", 0, 2)]) is not None and kept.cached("a", 0, 2) is None
    assert kept._rows is None


@pytest.fixture
def kept() -> ExpertRows:
    return ExpertRows(Hooks(), Batch(a=None))  # type: ignore[arg-type]


def test_a_request_that_runs_again_before_its_first_token_has_the_rows_of_the_new_pass(kept: ExpertRows) -> None:
    pending = PendingExperts(1)
    pending.add(kept, entry("a", 0, 3), rows(1, 2, 3))
    pending.start_again()
    pending.add(kept, entry("a", 0, 2), rows(7, 8))
    pending.add(kept, entry("a", 2, 2), rows(9, 6))
    assert values(pending.take()) == (1, [8, 9, 6])


def test_rows_that_were_sent_are_not_sent_again(kept: ExpertRows) -> None:
    pending = PendingExperts(0)
    pending.add(kept, entry("a", 0, 3), rows(1, 2, 3))
    assert values(pending.take()) == (0, [1, 2, 3])
    pending.start_again()
    pending.add(kept, entry("a", 0, 4), rows(4, 5, 6, 7))
    assert values(pending.take()) == (3, [7])


def test_a_row_that_is_not_known_is_missing_between_others(kept: ExpertRows) -> None:
    pending = PendingExperts(0)
    for place, step in enumerate((rows(1), None, rows(3))):
        pending.add(kept, entry("a", place, 1), step)
    column = pending.take()
    assert column is not None and column.rows.missing.tolist() == [False, True, False]
    pending.add(kept, entry("a", 3, 1), None)
    assert pending.take() is None
    pending.add(kept, entry("a", 4, 1), rows(5))
    assert values(pending.take()) == (4, [5])
