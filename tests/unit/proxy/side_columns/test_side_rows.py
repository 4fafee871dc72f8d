"""Rows beside tokens: cut and joined like the tokens, with missing rows marked in every dtype."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, TOP_IDS, StoredColumn, loaded, stored
from proxy.side_columns.rows import SideColumn, SideRows, joined, spread
from tokengrove.rows_beside import missing_value

DTYPES = [np.dtype(name) for name in ("uint8", "uint16", "uint32", "float32", "int16")]
Plain = list[list[float] | None]
"""Rows as lists; None: missing."""


def fixed(rows: Plain, dtype: Any = np.uint16, width: int = 2) -> SideRows:
    """Rows [R, width]."""
    dtype = np.dtype(dtype)
    blank = [missing_value(dtype)] * width
    return SideRows(np.array([blank if row is None else row for row in rows], dtype).reshape(len(rows), width))


def ragged(rows: Plain, dtype: Any = np.uint32) -> SideRows:
    """Sets of ids; a set that begins with -1 is all ids but the others."""
    ids: list[float] = []
    counts: list[int] = []
    for row in rows:
        listed = [] if row is None else [each for each in row if each >= 0]
        ids += listed
        counts.append(0 if row is None else -len(listed) - 1 if -1 in row else len(listed))
    return SideRows(np.array(ids, dtype), np.array(counts, np.int32))


def plain(rows: SideRows) -> Plain:
    """The inverse of `fixed` and `ragged`."""
    absent = rows.missing.tolist()
    if rows.counts is None:
        return [None if gone else each for gone, each in zip(absent, rows.values.tolist(), strict=True)]
    heads = [[-1] if count < 0 else [] for count in rows.counts.tolist()]
    listed = [head + ids.tolist() for head, ids in zip(heads, rows.sets(), strict=True)]
    return [None if gone else each for gone, each in zip(absent, listed, strict=True)]


IDS = st.lists(st.integers(0, 300), min_size=1, max_size=4, unique=True).map(sorted)
SETS = st.lists(st.none() | IDS | IDS.map(lambda ids: [-1, *ids]) | st.just([-1]), max_size=9)
PAIRS = st.lists(st.none() | st.lists(st.integers(0, 300), min_size=2, max_size=2), max_size=9)
KINDS = st.sampled_from([(fixed, PAIRS), (ragged, SETS)])


@given(st.data())
def test_rows_are_cut_and_joined_like_lists(data: st.DataObject) -> None:
    make, rows = data.draw(KINDS)
    given_rows: Plain = data.draw(rows)
    first = data.draw(st.integers(0, len(given_rows)))
    stop = data.draw(st.integers(first, len(given_rows)))
    made = make(given_rows)
    assert plain(made[first:stop]) == given_rows[first:stop]
    assert plain(joined([made[:first], made[first:stop], made[stop:]])) == given_rows
    assert len(made) == len(given_rows)


@given(st.data())
def test_the_first_present_row_of_each_token_counts_and_the_others_are_missing(data: st.DataObject) -> None:
    make, rows = data.draw(KINDS)
    columns: list[tuple[int, Plain]] = data.draw(st.lists(st.tuples(st.integers(0, 12), rows), min_size=1, max_size=4))
    start = data.draw(st.integers(0, 8))
    end = data.draw(st.integers(start, 20))
    expected: Plain = []
    for position in range(start, end):
        known = [given[position - at] for at, given in columns if at <= position < at + len(given)]
        expected.append(next((row for row in known if row is not None), None))
    found = spread([SideColumn(at, make(given)) for at, given in columns], start, end)
    assert plain(found) == expected


def test_the_rows_of_a_branch_are_its_own_and_the_shared_ones_are_of_the_turn_that_brought_them() -> None:
    root = SideColumn(0, fixed([[1, 1], [1, 2], [1, 3], None]))  # its last token was not taken in
    left = SideColumn(3, fixed([[2, 1], [2, 2]]))
    right = SideColumn(3, fixed([[3, 1], None, [3, 3]]))
    assert plain(spread([root, left], 0, 6)) == [[1, 1], [1, 2], [1, 3], [2, 1], [2, 2], None]
    assert plain(spread([root, right], 0, 6)) == [[1, 1], [1, 2], [1, 3], [3, 1], None, [3, 3]]


def test_rows_within_a_span_are_cut_at_both_ends_and_may_be_none() -> None:
    column = SideColumn(5, fixed([[1, 1], [2, 2], [3, 3]]))
    for span, expected in [((6, 7), (6, 7)), ((0, 99), (5, 8)), ((0, 3), (5, 5)), ((9, 12), (8, 8)), ((7, 6), (7, 7))]:
        part = column.within(*span)
        assert (part.start, part.end) == expected
    assert column.moved(-5).start == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_missing_row_is_never_zero_and_no_row_of_zeros_is_missing(dtype: np.dtype[Any]) -> None:
    rows = fixed([[0, 0], None, [1, 0]], dtype)
    assert rows.missing.tolist() == [False, True, False]
    assert rows.blank(2).missing.tolist() == [True, True]
    assert np.all(rows.blank(2).values != 0)


def test_a_row_with_some_missing_entries_is_not_missing() -> None:
    few = SideRows(np.array([[5, 2**32 - 1]], np.uint32))
    assert few.missing.tolist() == [False]
    assert few.smallest().values.tolist() == [[5, 255]]
    assert few.smallest().as_dtype(np.dtype(np.uint16)).values.tolist() == [[5, 2**16 - 1]]
    assert few.smallest().widened((3,)).values.tolist() == [[5, 255, 255]]


@pytest.mark.parametrize("values", [[[300]], [[255]]])
def test_rows_are_never_written_in_a_dtype_that_cannot_hold_them(values: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="uint8 cannot hold"):
        SideRows(np.array(values, np.uint16)).as_dtype(np.dtype(np.uint8))


@pytest.mark.parametrize(
    ("largest", "dtype"), [(0, "uint8"), (254, "uint8"), (255, "uint16"), (65_534, "uint16"), (65_535, "uint32")]
)
def test_the_smallest_dtype_keeps_the_missing_value_distinct(largest: int, dtype: str) -> None:
    rows = fixed([[largest, 0], None, [largest, largest]], np.uint32)
    small = rows.smallest()
    assert small.values.dtype == dtype
    assert plain(small) == plain(rows) == plain(small.as_dtype(np.dtype(np.uint32)))


@pytest.mark.parametrize(("largest", "dtype"), [(255, "uint8"), (256, "uint16"), (65_536, "uint32")])
def test_the_ids_of_sets_need_no_missing_value(largest: int, dtype: str) -> None:
    rows = ragged([[0, largest], None])
    assert rows.smallest().values.dtype == dtype
    assert plain(rows.smallest()) == plain(rows)


def test_rows_of_two_dtypes_are_joined_in_the_wider_one_and_stay_missing() -> None:
    both = joined([fixed([[254, 1], None], np.uint8), fixed([[300, 1], None], np.uint16)])
    assert both.values.dtype == np.uint16
    assert plain(both) == [[254, 1], None, [300, 1], None]


@pytest.mark.parametrize("other", [fixed([[1, 2, 3]], width=3), ragged([[1]])])
def test_rows_of_two_shapes_are_not_joined(other: SideRows) -> None:
    with pytest.raises(ValueError, match="cannot be joined"):
        joined([fixed([[1, 2]]), other])


@pytest.mark.parametrize(
    ("name", "values"),
    [
        (KEPT_LOGPROBS, np.array([-0.5, np.nan, -0.0], np.float32)),
        (EXPERTS, np.array([[[7, 0], [3, 2]], [[255, 255], [255, 255]]], np.uint8)),
        (EXPERTS, np.array([[[300, 0]]], np.uint32)),
        (TOP_IDS, np.zeros((0, 5), np.uint32)),
    ],
)
def test_a_stored_column_is_loaded_as_it_was(name: str, values: NDArray[Any]) -> None:
    column = stored(name, SideColumn(3, SideRows(values)))
    assert (column.start, column.number) == (3, len(values))
    again = loaded(column)
    assert again.start == 3 and plain(again.rows) == plain(SideRows(values))
    assert again.rows.inner == values.shape[1:]
    assert not np.shares_memory(again.rows.values, values)


@given(SETS)
def test_stored_sets_are_loaded_as_they_were(rows: Plain) -> None:
    assert plain(loaded(stored(KEPT, SideColumn(0, ragged(rows)))).rows) == rows


@pytest.mark.parametrize("damage", [{"number": 3}, {"data": b"\0"}, {"shape": "2,3"}, {"dtype": "uint16"}])
def test_a_column_whose_bytes_do_not_fit_its_rows_is_not_loaded(damage: dict[str, Any]) -> None:
    column: StoredColumn = stored(EXPERTS, SideColumn(0, fixed([[1, 2], [3, 4]])))._replace(**damage)
    with pytest.raises(ValueError, match=r"reshape|buffer"):
        loaded(column)


def test_48_layers_of_8_experts_take_384_bytes_a_token() -> None:
    experts = np.random.default_rng(0).integers(0, 128, (100, 48, 8)).astype(np.int64)
    column = stored(EXPERTS, SideColumn(0, SideRows(experts.astype(np.uint32))))
    assert (column.dtype, column.shape, len(column.data)) == ("uint8", "48,8", 100 * 384)
