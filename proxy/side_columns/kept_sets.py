"""Kept sets: the ids that truncation and a grammar left to draw a token from, one ragged row per sampled token.

A row lists the set or its complement, whichever is smaller. A set for which both are larger than the given limit is
missing: it is never cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.side_columns.rows import SideRows
from tokengrove.errors import EngineFailed
from tokengrove.rows_beside import set_sizes

ALL = -1
"""The count of a row with an empty complement: nothing was excluded."""


def kept_row(kept: NDArray[np.bool_], max_kept: int) -> SideRows:
    """One row for the mask `kept`, bool [vocabulary]."""
    number = int(kept.sum())
    inverted = 2 * number > len(kept)
    if min(number, len(kept) - number) > max_kept:
        return _row(np.zeros(0, np.uint32), 0)
    ids = np.flatnonzero(~kept if inverted else kept).astype(np.uint32)
    return _row(ids, -len(ids) - 1 if inverted else len(ids))


def kept_rows(sets: Iterable[Sequence[int] | None], vocab_size: int, max_kept: int) -> SideRows:
    """Rows for lists of kept ids, each id once, in any order. None: the set is not known.

    Raises EngineFailed for an id that the model does not have.
    """
    ids, counts = [np.zeros(0, np.uint32)], []
    for each in sets:
        number = len(each) if each is not None else 0
        if not number or min(number, vocab_size - number) > max_kept:
            counts.append(0)
            continue
        listed = np.unique(np.asarray(each, np.int64))
        if not 0 <= listed[0] <= listed[-1] < vocab_size:
            wrong = listed[0] if listed[0] < 0 else listed[-1]
            raise EngineFailed(f"the engine gave a kept set with token {wrong}, which the model lacks")
        count = len(listed)
        if 2 * count > vocab_size:
            listed = np.setdiff1d(np.arange(vocab_size), listed, assume_unique=True)
            count = -len(listed) - 1
        ids.append(listed.astype(np.uint32))
        counts.append(count)
    return SideRows(np.concatenate(ids), np.array(counts, np.int32))


def _row(ids: NDArray[np.uint32], count: int) -> SideRows:
    return SideRows(ids, np.array([count], np.int32))


def packed(rows: SideRows) -> bytes:
    """The rows as bytes: each as ids or as a set of bits, whichever is smaller.

    One byte with the size of a count, then the counts, then one bit per row that says whether it is a set of bits, then
    the rows. A set of bits begins with its length in bytes, uint32. All integers are little-endian.
    """
    assert rows.counts is not None
    width = rows.values.dtype.itemsize
    furthest = min(int(rows.counts.min(initial=0)), -int(rows.counts.max(initial=0)) - 1)
    counts = rows.counts.astype(np.min_scalar_type(furthest))
    sizes = set_sizes(rows.counts)
    ends = np.cumsum(sizes)
    last = rows.values[np.maximum(ends - 1, 0)].astype(np.int64) if len(rows.values) else np.zeros(len(rows), np.int64)
    flags = (sizes > 0) & (4 + last // 8 + 1 < sizes * width)
    parts, done = [], 0
    for number in np.flatnonzero(flags).tolist():
        end = int(ends[number])
        start = end - int(sizes[number])
        parts += [_little(rows.values[done:start]), _bits(rows.values[start:end])]
        done = end
    parts.append(_little(rows.values[done:]))
    head = bytes([counts.dtype.itemsize]) + _little(counts) + np.packbits(flags).tobytes()
    return head + b"".join(parts)


def unpacked(data: bytes, number: int, dtype: np.dtype[Any]) -> SideRows:
    """The `number` rows that `packed` wrote, with ids of `dtype`. Raises ValueError for other bytes."""
    size = data[0] if data else 0
    at = 1 + size * number
    if size not in (1, 2, 4) or number < 0 or len(data) < at + (number + 7) // 8:
        raise ValueError(f"not a column of {number} kept sets")
    counts = np.frombuffer(data[1:at], f"<i{size}").astype(np.int32)
    flags = np.unpackbits(np.frombuffer(data[at : at + (number + 7) // 8], np.uint8), count=number).astype(bool)
    at += (number + 7) // 8
    found, sizes, done = [np.zeros(0, dtype)], set_sizes(counts), 0
    for row in [*np.flatnonzero(flags).tolist(), number]:  # the rows from `done` to each of these are ids
        end = at + int(sizes[done:row].sum()) * dtype.itemsize
        found.append(np.frombuffer(data[at:end], dtype.newbyteorder("<")).astype(dtype))
        at, done = end, row + 1
        if row < number:
            at = end + 4 + int.from_bytes(data[end : end + 4], "little")
            ids = np.flatnonzero(np.unpackbits(np.frombuffer(data[end + 4 : at], np.uint8), bitorder="little"))
            if len(ids) != sizes[row]:
                raise ValueError("a set of bits has another number of ids")
            found.append(ids.astype(dtype))
    if at != len(data):
        raise ValueError(f"the rows end at byte {at} of {len(data)}")
    return SideRows(np.concatenate(found), counts)


def _bits(ids: NDArray[Any]) -> bytes:
    mask = np.zeros(int(ids[-1]) + 1, bool)
    mask[ids] = True
    bits = np.packbits(mask, bitorder="little").tobytes()
    return len(bits).to_bytes(4, "little") + bits


def _little(values: NDArray[Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()
