"""The side columns of a turn are cut like its tokens, and the first row of each token counts."""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
import pytest

from proxy.engine.chunks import TokenChunk
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS, TOP_IDS, TOP_LOGPROBS, ColumnRequest
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.turns.column_log import ColumnLog
from proxy.types import ids_of
from tokengrove.options.start import Replay

PROMPT = 4


def log(*replay: Replay, start: int = 0, alternatives: int = 0) -> ColumnLog:
    return ColumnLog(ColumnRequest(frozenset(replay), start=start), alternatives)


def chunk(count: int, columns: Any = None, top: Any = ()) -> TokenChunk:
    return TokenChunk(ids_of(range(count)), array("f", [-1.0] * count), 0, top_logprobs=top, columns=columns)


def logprobs(*values: float) -> SideRows:
    return SideRows(np.array(values, np.float32))


def experts(start: int, end: int, of_pass: int = 0) -> SideColumn:
    """Rows of the tokens [start, end): one layer, whose expert says the position and the forward pass."""
    return SideColumn(start, SideRows(np.array([[[at + 100 * of_pass]] for at in range(start, end)], np.uint8)))


def numbers(column: SideColumn) -> list[int]:
    return column.rows.values[:, 0, 0].tolist()  # type: ignore[no-any-return]


def test_rows_after_the_end_of_the_output_are_cut() -> None:
    """As after a stop string, of which the turn keeps two of four tokens."""
    taken = log(Replay.KEPT)
    taken.add(chunk(3, {KEPT_LOGPROBS: SideColumn(PROMPT, logprobs(-0.1, -0.2, -0.3))}), PROMPT)
    taken.add(chunk(1, {KEPT_LOGPROBS: SideColumn(PROMPT + 3, logprobs(-0.4))}), PROMPT + 3)
    found, missing = taken.taken(0, PROMPT, 2)
    assert found[KEPT_LOGPROBS].start == PROMPT
    assert found[KEPT_LOGPROBS].rows.values.tolist() == pytest.approx([-0.1, -0.2])
    assert missing == {KEPT: 2, KEPT_LOGPROBS: 0}
    assert KEPT not in found


@pytest.mark.parametrize("rows", [PROMPT + 3 - 1, PROMPT + 3])
def test_n_tokens_have_n_minus_1_rows_of_experts_also_if_the_engine_reports_n(rows: int) -> None:
    taken = log(Replay.EXPERTS)
    taken.add(chunk(3, {EXPERTS: experts(0, rows)}), PROMPT)
    found, missing = taken.taken(0, PROMPT, 3)
    assert (found[EXPERTS].start, found[EXPERTS].end) == (0, PROMPT + 3 - 1)
    assert numbers(found[EXPERTS]) == list(range(PROMPT + 2))
    assert missing == {EXPERTS: 0}


@pytest.mark.parametrize(("prefix", "first"), [(0, 0), (1, 0), (3, 2)])
def test_experts_begin_at_the_last_token_of_the_prefix(prefix: int, first: int) -> None:
    taken = log(Replay.EXPERTS, start=max(prefix - 1, 0))
    taken.add(chunk(2, {EXPERTS: experts(0, PROMPT + 1)}), PROMPT)
    found, _ = taken.taken(prefix, PROMPT, 2)
    assert numbers(found[EXPERTS]) == list(range(first, PROMPT + 1))


def test_a_turn_that_drifted_from_its_parent_has_all_rows_and_names_those_it_did_not_ask_for() -> None:
    taken = log(Replay.EXPERTS, start=2)
    taken.add(chunk(2, {EXPERTS: experts(2, PROMPT + 1)}), PROMPT)
    found, missing = taken.taken(0, PROMPT, 2)
    assert (found[EXPERTS].start, numbers(found[EXPERTS])[2:]) == (0, [2, 3, 4])
    assert found[EXPERTS].rows.missing.tolist() == [True, True, False, False, False]
    assert missing == {EXPERTS: 2}


def test_rows_that_a_resubmission_repeats_are_those_of_the_first_pass() -> None:
    taken = log(Replay.EXPERTS)
    taken.add(chunk(1, {EXPERTS: experts(0, 3)}), PROMPT)
    taken.add(chunk(2, {EXPERTS: experts(1, PROMPT + 2, of_pass=1)}), PROMPT + 1)
    found, missing = taken.taken(0, PROMPT, 3)
    assert numbers(found[EXPERTS]) == [0, 1, 2, 103, 104, 105]
    assert missing == {EXPERTS: 0}


def test_a_missing_row_gives_way_to_one_that_arrives_later() -> None:
    taken = log(Replay.KEPT)
    taken.add(chunk(2, {KEPT_LOGPROBS: SideColumn(PROMPT, logprobs(np.nan, -0.2))}), PROMPT)
    taken.add(chunk(0, {KEPT_LOGPROBS: SideColumn(PROMPT, logprobs(-0.1, -0.9))}), PROMPT + 2)
    found, missing = taken.taken(0, PROMPT, 2)
    assert found[KEPT_LOGPROBS].rows.values.tolist() == pytest.approx([-0.1, -0.2])
    assert missing[KEPT_LOGPROBS] == 0


def test_tokens_without_a_row_are_counted_as_missing() -> None:
    taken = log(Replay.EXPERTS, Replay.KEPT)
    taken.add(chunk(4, {EXPERTS: experts(1, 3), KEPT_LOGPROBS: SideColumn(PROMPT + 1, logprobs(-0.5))}), PROMPT)
    found, missing = taken.taken(0, PROMPT, 4)
    assert missing == {EXPERTS: 7 - 2, KEPT: 4, KEPT_LOGPROBS: 3}
    assert found[KEPT_LOGPROBS].rows.missing.tolist() == [True, False, True, True]


def test_columns_that_were_not_asked_for_are_not_recorded() -> None:
    taken = log(Replay.KEPT)
    taken.add(chunk(1, {EXPERTS: experts(0, 4), "unknown": experts(0, 4)}, top=(((7, -0.1),),)), PROMPT)
    assert taken.taken(0, PROMPT, 1) == ({}, {KEPT: 1, KEPT_LOGPROBS: 1})


def test_alternatives_are_those_of_the_sampled_tokens_and_blank_where_there_are_fewer() -> None:
    taken = log(Replay.TOP_LOGPROBS, alternatives=2)
    taken.add(chunk(2, top=(((7, -0.1), (8, -2.0), (9, -3.0)), ((5, -0.5),))), PROMPT)
    taken.add(chunk(1, top=(((3, -0.25), (0, -1.5)),)), PROMPT + 2)
    found, missing = taken.taken(0, PROMPT, 3)
    assert found[TOP_IDS].rows.values.tolist() == [[7, 8], [5, 2**32 - 1], [3, 0]]
    assert np.isnan(found[TOP_LOGPROBS].rows.values).tolist() == [[False, False], [False, True], [False, False]]
    assert (found[TOP_IDS].start, missing) == (PROMPT, {TOP_IDS: 0, TOP_LOGPROBS: 0})


def test_a_turn_without_output_has_rows_of_its_prompt_alone() -> None:
    taken = log(Replay.EXPERTS, Replay.KEPT)
    taken.add(chunk(0, {EXPERTS: experts(0, PROMPT)}), PROMPT)
    found, missing = taken.taken(0, PROMPT, 0)
    assert numbers(found[EXPERTS]) == [0, 1, 2]
    assert missing == {EXPERTS: 0, KEPT: 0, KEPT_LOGPROBS: 0}
