"""Rows that arrive one by one are joined without a change."""

from __future__ import annotations

import numpy as np

from proxy.engine.chunks import TokenChunk
from proxy.side_columns.columns import EXPERTS, KEPT, ColumnRequest
from proxy.side_columns.rows import SideColumn, SideRows, merged, spread
from proxy.turns.column_log import ColumnLog
from proxy.types import Logprobs, ids_of
from tokengrove.options.start import Replay


def column(start: int, *values: int) -> SideColumn:
    return SideColumn(start, SideRows(np.array(values, np.uint8).reshape(-1, 1)))


def test_columns_that_follow_each_other_are_joined_in_their_order() -> None:
    parts = [column(3, 1, 2), column(5, 3), column(9, 4), column(9, 5), column(10, 6), column(6, 7)]
    found = merged(parts)
    assert [(each.start, each.rows.values[:, 0].tolist()) for each in found] == [
        (3, [1, 2, 3]),
        (9, [4]),
        (9, [5, 6]),
        (6, [7]),
    ]
    assert spread(found, 3, 11).values.tolist() == spread(parts, 3, 11).values.tolist()


def test_long_columns_are_not_copied_again() -> None:
    long = SideColumn(0, SideRows(np.zeros((5000, 1), np.uint8)))
    assert merged([long, column(5000, 1), column(5001, 2)])[0].rows is long.rows


def test_a_log_of_many_chunks_keeps_few_parts_and_every_row() -> None:
    log = ColumnLog(ColumnRequest(frozenset({Replay.KEPT, Replay.EXPERTS})), 0)
    for place in range(1000):
        kept = SideRows(np.arange(place % 3 + 1, dtype=np.uint32), np.array([place % 3 + 1], np.int32))
        experts = SideRows(np.full((1, 2, 1), place % 200, np.uint8))
        columns = {KEPT: SideColumn(10 + place, kept), EXPERTS: SideColumn(9 + place, experts)}
        log.add(TokenChunk(ids_of((1,)), Logprobs("f", (-1.0,)), columns=columns), 10 + place)
    assert max(map(len, log._parts.values())) < 64
    assert spread(log._parts[EXPERTS], 9, 1009).values[:, 1, 0].tolist() == [place % 200 for place in range(1000)]
    kept = spread(log._parts[KEPT], 10, 1010)
    assert [each.tolist() for each in kept.sets()] == [[*range(place % 3 + 1)] for place in range(1000)]
