"""Kept sets are stored whole, as ids, complement or bits, or are missing: they are never cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxy.side_columns.kept_sets import ALL, kept_row, kept_rows, packed, unpacked
from proxy.side_columns.rows import SideRows, joined

VOCABULARY = 400
MASKS = st.integers(0, VOCABULARY).flatmap(
    lambda number: st.randoms(use_true_random=False).map(lambda chance: mask(chance.sample(range(VOCABULARY), number)))
)


def mask(ids: list[int]) -> NDArray[np.bool_]:
    made = np.zeros(VOCABULARY, bool)
    made[ids] = True
    return made


def sets_of(rows: SideRows) -> list[list[bool] | None]:
    """The mask of each row; None: missing."""
    assert rows.counts is not None
    found: list[list[bool] | None] = []
    for count, ids in zip(rows.counts.tolist(), rows.sets(), strict=True):
        kept = mask(ids.tolist())
        found.append(None if count == 0 else (~kept if count < 0 else kept).tolist())
    return found


@given(st.lists(MASKS, max_size=6), st.integers(1, 250))
@pytest.mark.wide
def test_a_set_is_kept_whole_unless_it_and_its_complement_are_too_large(
    masks: list[NDArray[np.bool_]], max_kept: int
) -> None:
    expected = [
        each.tolist() if each.sum() > 0 and min(each.sum(), VOCABULARY - each.sum()) <= max_kept else None
        for each in masks
    ]
    rows = [kept_row(each, max_kept) for each in masks]
    assert [sets_of(row)[0] for row in rows] == expected
    listed = kept_rows([np.flatnonzero(each).tolist()[::-1] for each in masks], VOCABULARY, max_kept)
    assert sets_of(listed) == expected
    assert len(listed.values) <= max_kept * len(masks)


@given(st.lists(MASKS, max_size=6), st.sampled_from(["uint16", "uint32"]))
@pytest.mark.wide
def test_packed_sets_are_unpacked_as_they_were(masks: list[NDArray[np.bool_]], dtype: str) -> None:
    rows = joined([SideRows(np.zeros(0, np.uint32), np.zeros(0, np.int32)), *(kept_row(each, 512) for each in masks)])
    again = unpacked(packed(rows.as_dtype(np.dtype(dtype))), len(masks), np.dtype(dtype))
    assert again.values.dtype == dtype
    assert sets_of(again) == sets_of(rows) == [each.tolist() if each.any() else None for each in masks]


@pytest.mark.parametrize("number", [1, 127, 128, 129, 32_767, 32_768, 32_769])
@pytest.mark.parametrize("inverted", [False, True])
def test_a_count_at_the_edge_of_a_size_is_unpacked_as_it_was(number: int, inverted: bool) -> None:
    rows = SideRows(np.arange(number, dtype=np.uint32), np.array([-number - 1 if inverted else number], np.int32))
    again = unpacked(packed(rows), 1, np.dtype(np.uint32))
    assert again.counts is not None and rows.counts is not None
    assert again.counts.tolist() == rows.counts.tolist()
    assert np.array_equal(again.values, rows.values)


def test_a_row_takes_the_smallest_of_ids_complement_and_bits() -> None:
    few, many, dense = mask([3, 9]), ~mask([7]), mask(list(range(0, 300, 2)))
    sizes = [len(packed(kept_row(each, 512).smallest())) - 2 for each in (few, many, dense)]
    assert sizes[0] == 1 + 2 * 1  # the count and two ids of a byte
    assert sizes[1] == 1 + 1
    assert sizes[2] == 2 + 4 + 299 // 8 + 1  # bits up to the last id, and their length


def test_nothing_excluded_takes_no_ids_and_is_not_missing() -> None:
    row = kept_row(np.ones(VOCABULARY, bool), 1)
    assert row.counts is not None
    assert (row.counts.tolist(), len(row.values), row.missing.tolist()) == ([ALL], 0, [False])


def test_a_set_that_is_not_known_or_empty_is_missing() -> None:
    assert kept_rows([None, [], [4, 4]], VOCABULARY, 5).missing.tolist() == [True, True, False]
    assert kept_row(np.zeros(VOCABULARY, bool), 5).missing.tolist() == [True]


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5, 2**31])
def test_bytes_of_another_number_of_rows_are_refused(number: int) -> None:
    rows = joined([kept_row(mask([1, 2]), 5), kept_row(mask([3]), 5), kept_row(mask(list(range(150))), 512)])
    data = packed(rows)
    if number == 3:
        assert len(unpacked(data, number, rows.values.dtype)) == 3
        return
    with pytest.raises(ValueError, match=r"kept sets|end at byte|buffer|bits"):
        unpacked(data, number, rows.values.dtype)


@given(st.randoms(use_true_random=False), st.binary(max_size=3))
def test_damaged_bytes_are_refused_or_have_as_many_rows(chance: object, more: bytes) -> None:
    data = bytearray(packed(joined([kept_row(mask([1, 2, 390]), 5), kept_row(~mask([3]), 5)])) + more)
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)  # type: ignore[attr-defined]
    try:
        rows = unpacked(bytes(data), 2, np.dtype(np.uint32))
    except ValueError:
        return
    assert len(rows) == 2 and sum(1 for _ in rows.sets()) == 2
