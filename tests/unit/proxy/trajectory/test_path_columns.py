"""The rows of a path come from the turns that brought its tokens, whatever part of the path is asked for."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from proxy.side_columns.columns import EXPERTS, KEPT_LOGPROBS, Columns
from proxy.side_columns.rows import SideColumn, SideRows
from proxy.trajectory.path_columns import PathColumns
from proxy.trajectory.token_path import PartKind, token_path
from proxy.trajectory.tree import build_tree
from proxy.types import Interaction
from tests.interactions import forests, interaction
from tokengrove.options.export import Drift

MISSING = -1


def drifted() -> list[Interaction]:
    """Three turns; the prompt of the third has the first answer again, two tokens later, and another second answer."""
    return [
        interaction("0", suffix=[1, 2, 3], output=[4, 5], seq=0),
        interaction("1", parent="0", prefix=5, suffix=[6], output=[7, 8], seq=1),
        interaction("2", parent="1", suffix=[80, 81, 1, 2, 3, 4, 5, 6, 70], output=[9], seq=2),
    ]


def value_of(turn: Interaction, position: int) -> int:
    """What the row of a turn says of the token at a position of its own sequence."""
    return 1000 * turn.seq + position


def columns_of(turns: Sequence[Interaction]) -> dict[str, Columns]:
    """The columns that turns store: experts from the last token of the parent on, and logprobs of sampled tokens."""
    found: dict[str, Columns] = {}
    for turn in turns:
        turn.replay = {EXPERTS: 0, KEPT_LOGPROBS: 0}
        whole = turn.prompt_tokens + len(turn.output_ids)
        start = max(turn.prefix_length - 1, 0)
        experts = np.array([[[value_of(turn, at)]] for at in range(start, whole - 1)], np.uint16).reshape(-1, 1, 1)
        kept = np.array([value_of(turn, at) for at in range(turn.prompt_tokens, whole)], np.float32)
        found[turn.id] = {
            EXPERTS: SideColumn(start, SideRows(experts)),
            KEPT_LOGPROBS: SideColumn(turn.prompt_tokens, SideRows(kept)),
        }
    return found


def told(columns: PathColumns, name: str, stored: dict[str, Columns]) -> list[int]:
    """The values of the rows; MISSING for a missing one."""
    rows = columns.rows(name, {turn.id: stored[turn.id] for turn in columns.turns})
    if rows is None:
        return [MISSING] * (columns.end - columns.start)
    values = np.nan_to_num(rows.values.reshape(len(rows)).astype(np.float64))
    return list(map(int, np.where(rows.missing, MISSING, values)))


@given(forests(), st.sampled_from(Drift), st.data())
@example(drifted(), Drift.MASK, None)
def test_each_token_has_the_row_of_the_turn_that_brought_it(
    interactions: list[Interaction], drift: Drift, data: st.DataObject | None
) -> None:
    stored = columns_of(interactions)
    for node in build_tree(interactions).values():
        path = token_path(node, drift)
        count = len(path.ids)
        kept, experts = [MISSING] * count, [MISSING] * count
        for part, after in zip(path.parts, [*path.parts[1:], None], strict=True):
            turn, moved = part.interaction, 0
            if part.kind is PartKind.OUTPUT:
                moved = part.start - turn.prompt_tokens
                kept[part.start : part.end] = [value_of(turn, at - moved) for at in range(part.start, part.end)]
            experts[part.start : part.end] = [value_of(turn, at - moved) for at in range(part.start, part.end)]
            if part.kind is PartKind.OUTPUT:
                next_turn = None if after is None else after.interaction
                experts[part.end - 1] = MISSING if next_turn is None else value_of(next_turn, part.end - 1)
        start = 0 if data is None else data.draw(st.integers(0, count))
        end = count if data is None else data.draw(st.integers(start, count))
        columns = PathColumns(path, start, end)
        assert told(columns, KEPT_LOGPROBS, stored) == kept[start:end]
        assert told(columns, EXPERTS, stored) == experts[start:end]


def test_a_column_that_no_turn_of_the_part_recorded_is_not_recorded() -> None:
    turns = drifted()[:2]
    turns[1].replay = {EXPERTS: 3}
    path = token_path(build_tree(turns)["1"], Drift.FORK)
    assert PathColumns(path, 5, 8).are_recorded(EXPERTS)
    assert not PathColumns(path, 5, 8).are_recorded(KEPT_LOGPROBS)
    assert not PathColumns(path, 0, 2).are_recorded(EXPERTS)
