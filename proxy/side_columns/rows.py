"""Rows beside tokens: one row per token, all of one dtype. A missing row is marked as missing and is never zero.

Rows are fixed (every row has the same shape) or ragged (each row is a set of ids). A missing fixed row has the missing
value of its dtype in every entry, which no present row has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.rows_beside import missing_value, set_sizes


@dataclass(frozen=True, slots=True, eq=False)
class SideRows:
    """R rows. Fixed: `values` [R, ...]. Ragged: `counts` int32 [R], and `values` [ids], one row after another.

    A count n above 0: the row is a set of n ids. 0: the row is missing. -(n + 1): the row is all ids but the n ids that
    it lists. The ids of a row are in ascending order.
    """

    values: NDArray[Any]
    counts: NDArray[np.int32] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.counts is None else len(self.counts)

    def __getitem__(self, at: slice) -> SideRows:
        """Consecutive rows; a step is not supported."""
        if self.counts is None:
            return SideRows(self.values[at])
        first, stop, _ = at.indices(len(self))
        ends = np.concatenate([[0], np.cumsum(set_sizes(self.counts))])
        return SideRows(self.values[ends[first] : ends[max(first, stop)]], self.counts[first : max(first, stop)])

    @property
    def ragged(self) -> bool:
        return self.counts is not None

    @property
    def inner(self) -> tuple[int, ...]:
        """The shape of one fixed row; (): a number, or a set."""
        return tuple(self.values.shape[1:])

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + (0 if self.counts is None else self.counts.nbytes)

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Which rows are missing, bool [R]."""
        if self.counts is not None:
            return np.asarray(self.counts == 0)
        return np.asarray(self._blank.all(axis=tuple(range(1, self.values.ndim))))

    def blank(self, count: int) -> SideRows:
        """`count` missing rows of the same kind."""
        if self.counts is not None:
            return SideRows(self.values[:0], np.zeros(count, np.int32))
        return SideRows(np.full((count, *self.inner), missing_value(self.values.dtype), self.values.dtype))

    def only(self, kept: NDArray[np.bool_]) -> SideRows:
        """The same rows, without those that are not `kept`, bool [R], which are missing."""
        if self.counts is not None:
            listed = np.repeat(kept, set_sizes(self.counts))
            return SideRows(self.values[listed], np.where(kept, self.counts, 0).astype(np.int32))
        values = self.values.copy()
        values[~kept] = missing_value(values.dtype)
        return SideRows(values)

    def smallest(self) -> SideRows:
        """The same rows in the smallest unsigned dtype that can hold them, if they are unsigned integers."""
        if self.values.dtype.kind != "u":
            return self
        dtype = np.min_scalar_type(self._largest + (0 if self.ragged else 1))  # the largest value marks what is missing
        return self if dtype.itemsize >= self.values.dtype.itemsize else self.as_dtype(dtype)

    def as_dtype(self, dtype: np.dtype[Any]) -> SideRows:
        """The same rows in another dtype. Raises ValueError if it cannot hold them."""
        if self.values.dtype == dtype:
            return self
        if dtype.kind == "u" and self._largest + (0 if self.ragged else 1) > np.iinfo(dtype).max:
            raise ValueError(f"{dtype} cannot hold {self._largest}")
        values = self.values.astype(dtype)
        if not self.ragged:
            values[self._blank] = missing_value(dtype)
        return SideRows(values, self.counts)

    def widened(self, inner: tuple[int, ...]) -> SideRows:
        """The same rows with missing entries at the end of each, up to the shape `inner`."""
        if self.inner == inner:
            return self
        values = np.full((len(self), *inner), missing_value(self.values.dtype), self.values.dtype)
        values[:, *(slice(size) for size in self.inner)] = self.values
        return SideRows(values)

    @property
    def _blank(self) -> NDArray[np.bool_]:
        """Which entries are missing, in the shape of fixed `values`."""
        if self.values.dtype.kind == "f":
            return np.asarray(np.isnan(self.values))
        return np.asarray(self.values == missing_value(self.values.dtype))

    @property
    def _largest(self) -> int:
        """The largest of unsigned `values` that is not missing."""
        present = self.values if self.ragged else self.values[~self._blank]
        return int(present.max(initial=0))

    def sets(self) -> Iterator[NDArray[Any]]:
        """The ids that each ragged row lists."""
        assert self.counts is not None
        yield from np.split(self.values, np.cumsum(set_sizes(self.counts))[:-1]) if len(self.counts) else ()


def joined(pieces: Sequence[SideRows]) -> SideRows:
    """The rows of all pieces, at least one, in order. Raises ValueError for rows of different shapes."""
    if len(pieces) == 1:
        return pieces[0]
    if len({(each.inner, each.ragged) for each in pieces}) > 1:
        raise ValueError(f"rows of shape {pieces[0].inner} cannot be joined to rows of another shape")
    dtype = np.result_type(*(each.values.dtype for each in pieces))
    alike = [each.as_dtype(dtype) for each in pieces]
    counts = [each.counts for each in alike if each.counts is not None]
    return SideRows(np.concatenate([each.values for each in alike]), np.concatenate(counts) if counts else None)


@dataclass(frozen=True, slots=True, eq=False)
class SideColumn:
    """Rows of consecutive tokens. `start`: the position of the token of the first row, in its whole sequence."""

    start: int
    rows: SideRows

    @property
    def end(self) -> int:
        return self.start + len(self.rows)

    def moved(self, by: int) -> SideColumn:
        return SideColumn(self.start + by, self.rows)

    def without(self, start: int, end: int) -> SideColumn:
        """The column in which the rows of the tokens [start, end) are missing."""
        first = min(max(start - self.start, 0), len(self.rows))
        last = min(max(end - self.start, first), len(self.rows))
        if first == last:
            return self
        return SideColumn(self.start, joined([self.rows[:first], self.rows.blank(last - first), self.rows[last:]]))

    def within(self, start: int, end: int) -> SideColumn:
        """The rows of the tokens [start, end), as far as there are any."""
        first = min(max(start, self.start), self.end)
        last = max(min(end, self.end), first)
        return SideColumn(first, self.rows[first - self.start : last - self.start])


_MOST_ROWS = 4096
"""Columns with more rows are not copied again to join others to them."""


def merged(columns: Sequence[SideColumn]) -> list[SideColumn]:
    """The same columns, where those that follow each other are joined."""
    runs: list[list[SideColumn]] = []
    rows, end = 0, -1
    for each in columns:
        count = len(each.rows)
        if end == each.start and rows + count <= _MOST_ROWS:
            runs[-1].append(each)
            rows += count
        else:
            runs.append([each])
            rows = count
        end = each.start + count
    return [SideColumn(run[0].start, joined([each.rows for each in run])) for run in runs]


def spread(columns: Sequence[SideColumn], start: int, end: int) -> SideRows:
    """The rows of the tokens [start, end) from columns, at least one. The first present row of a token counts."""
    owner = np.full(end - start, -1)
    for number in reversed(range(len(columns))):
        part = columns[number].within(start, end)
        owner[part.start - start : part.end - start][~part.rows.missing] = number
    edges = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), end - start]
    pieces = [columns[0].rows[:0]]
    for first, last in pairwise(edges):
        if first == last:
            continue
        part = columns[max(number := int(owner[first]), 0)]
        at = start - part.start
        pieces.append(part.rows.blank(last - first) if number < 0 else part.rows[at + first : at + last])
    return joined(pieces)
