"""Side columns of samples, compared with an oracle that looks at one token after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.side_columns.columns import EXPERTS, KEPT, Columns
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.sample_row import SampleRow
from proxy.types import Interaction, SamplingParams, SessionRecord
from tests.interactions import forests, interaction
from tests.side_columns import LAYERS, SHAPES, K, column_of, columns_of_all, experts, kept
from tokengrove.options.export import Drift, Keep, Layout, Padding, TooLong, TrainSelection
from tokengrove.reasons import Unrecomputable

OPTIONS = LayoutOptions(columns=SHAPES)
LAYOUTS = (Layout.INDIVIDUAL, Layout.CONCAT, Layout.TREE, Layout.PADDED)
PADDING = Padding(prompt_length=3, response_length=5, pad_token_id=999, on_too_long=TooLong.TRUNCATE)
MISSING = [[255] * K] * LAYERS


def rows_of(nodes: Sequence[Interaction], columns: Mapping[str, Columns], options: LayoutOptions) -> list[SampleRow]:
    return list(lay_out(SessionRecord("s"), nodes, options, columns=columns).rows)


def owners(nodes: Sequence[Interaction]) -> dict[int, tuple[int, int]]:
    """The turn and the position of each token, by its id, which no other token has."""
    found = {}
    for number, node in enumerate(nodes):
        for at, token in enumerate([*node.prompt_suffix, *node.output_ids]):
            found[token] = (number, node.prefix_length + at)
    return found


def passes_through(nodes: Sequence[Interaction], number: int, position: int, below: Sequence[int]) -> list[int]:
    """The turns with a row for a token of turn `number`, in order: itself, or for its last token a turn `below` it."""
    node = nodes[number]
    if position < node.prompt_tokens + len(node.output_ids) - 1:
        return [number]
    return [each for each in below if nodes[each].aligned and nodes[each].parent_id == node.id]


@given(forests(), st.data())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_token_has_the_row_of_the_pass_that_took_it_in(
    layout: Layout, nodes: list[Interaction], data: st.DataObject
) -> None:
    lacks = {node.id: data.draw(st.lists(st.integers(0, 30), max_size=4)) for node in nodes}
    columns = columns_of_all(nodes, lacks)
    for node in nodes:
        if data.draw(st.integers(0, 5)) == 0:
            del columns[node.id]
    padding = PADDING if layout is Layout.PADDED else None
    where = owners(nodes)
    for row in rows_of(nodes, columns, replace(OPTIONS, layout=layout, padding=padding)):
        found = row.columns()
        joined = [int(placed.interaction.id) for placed in row.placements]
        chain = _chain(nodes, joined[-1])
        below = joined if layout is Layout.TREE else chain
        for at, token in enumerate(found["input_ids"].tolist()):
            if token == PADDING.pad_token_id:
                assert found[EXPERTS][at].tolist() == MISSING
                continue
            number, position = where[token]
            passes = passes_through(nodes, number, position, below)
            there = [each for each in passes if nodes[each].id in columns and position not in lacks[nodes[each].id]]
            assert found[EXPERTS][at].tolist() == (experts(there[0], position) if there else MISSING)


def _chain(nodes: Sequence[Interaction], last: int) -> list[int]:
    """A turn and those above it that it is aligned with, oldest first."""
    found = [last]
    while nodes[found[0]].aligned:
        parent = nodes[found[0]].parent_id
        assert parent is not None
        found.insert(0, int(parent))
    return found


@given(forests(), st.data())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_trained_token_has_the_set_that_it_was_drawn_from(
    layout: Layout, nodes: list[Interaction], data: st.DataObject
) -> None:
    lacks = {node.id: data.draw(st.lists(st.integers(0, 30), max_size=4)) for node in nodes}
    columns, where = columns_of_all(nodes, lacks), owners(nodes)
    padding = PADDING if layout is Layout.PADDED else None
    for row in rows_of(nodes, columns, replace(OPTIONS, layout=layout, padding=padding)):
        found, first = row.columns(), 0
        for at, token in enumerate(found["input_ids"].tolist()):
            count = int(found["kept_counts"][at])
            size = -count - 1 if count < 0 else count
            ids, first = found["kept_ids"][first : first + size].tolist(), first + size
            if not found["loss_mask"][at]:
                assert count == 0 and np.isnan(found["kept_logprobs"][at])
                continue
            number, position = where[token]
            known = position not in lacks[nodes[number].id]
            index = position - nodes[number].prompt_tokens
            assert (count, ids) == (kept(number, index) if known else (0, []))
            logprob = np.float32(-(number + 1) / (index + 2)) if known else np.float32(np.nan)
            np.testing.assert_equal(found["kept_logprobs"][at], logprob)
            np.testing.assert_equal(found["top_logprobs"][at], [logprob, logprob * 2])
        assert first == len(found["kept_ids"])


@given(forests(), st.data())
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_label_names_exactly_the_tokens_whose_row_is_missing(
    layout: Layout, nodes: list[Interaction], data: st.DataObject
) -> None:
    lacks = {node.id: data.draw(st.lists(st.integers(0, 30), max_size=4)) for node in nodes}
    padding = PADDING if layout is Layout.PADDED else None
    for row in rows_of(nodes, columns_of_all(nodes, lacks), replace(OPTIONS, layout=layout, padding=padding)):
        found, told = row.columns(), row.labels()["replay"]
        named = {
            name: {at for first, end in each["missing"] for at in range(first, end)} for name, each in told.items()
        }
        trained = set(np.flatnonzero(found["loss_mask"]).tolist())
        assert named[KEPT] == {at for at in trained if found["kept_counts"][at] == 0}
        blank = {at for at, each in enumerate(found[EXPERTS].tolist()) if each == MISSING}
        assert named[EXPERTS] <= blank
        assert {at for at in blank - named[EXPERTS] if found["attention_mask"][at]} <= _ends(found)


def _ends(found: Mapping[str, Any]) -> set[int]:
    """The last tokens of sequences, which no forward pass took in."""
    if "node_offsets" in found:
        return {int(end) - 1 for end in found["node_offsets"][1:]}
    return {int(np.flatnonzero(found["attention_mask"])[-1])}


def test_rows_of_a_truncated_sample_move_with_its_tokens() -> None:
    node = interaction("0", suffix=range(10), output=range(20, 30))
    for keep in Keep:
        padding = replace(PADDING, keep=keep)
        (row,) = rows_of([node], columns_of_all([node]), replace(OPTIONS, layout=Layout.PADDED, padding=padding))
        found, where = row.columns(), owners([node])
        for at, token in enumerate(found["input_ids"].tolist()):
            position = where[token][1]
            assert found[EXPERTS][at].tolist() == (experts(0, position) if position < 19 else MISSING)


def test_outputs_found_again_after_a_drift_keep_the_rows_of_their_sampling() -> None:
    """The last token of the output was taken in by the prompt that has it again."""
    first = interaction("0", suffix=[1, 2, 3], output=[4, 5])
    second = interaction("1", parent="0", suffix=[9, 1, 2, 3, 4, 5, 6], output=[7], seq=1)
    columns = columns_of_all([first, second])
    (row,) = rows_of([first, second], columns, replace(OPTIONS, drift=Drift.MASK))
    found = row.columns()
    assert found["input_ids"].tolist() == [9, 1, 2, 3, 4, 5, 6, 7]
    assert found["loss_mask"].tolist() == [0, 0, 0, 0, 1, 1, 0, 1]
    assert [each[0][0] for each in found[EXPERTS].tolist()] == [1, 1, 1, 1, 0, 1, 1, 255]
    assert found["kept_counts"].tolist() == [0, 0, 0, 0, kept(0, 0)[0], kept(0, 1)[0], 0, kept(1, 0)[0]]


SAMPLING = SamplingParams(top_p=0.9, top_k=5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SAMPLING, None),
        (SAMPLING._replace(logit_bias=((1, 2.0),)), Unrecomputable.BIAS),
        (SAMPLING._replace(presence_penalty=0.5), Unrecomputable.PENALTIES),
    ],
)
def test_a_turn_with_its_sets_is_neither_truncated_nor_under_a_grammar(
    layout: Layout, sampling: SamplingParams, reason: Unrecomputable | None
) -> None:
    node = replace(interaction("0", suffix=[1, 2], output=[3, 4]), sampling=sampling, grammar=True, replay={KEPT: 0})
    padding = Padding(prompt_length=8, response_length=8) if layout is Layout.PADDED else None
    options = replace(OPTIONS, layout=layout, padding=padding, train=TrainSelection(constrained=True))
    with_sets, without = columns_of_all([node]), dict[str, Columns]()
    assert [row.labels()["recomputable"] for row in rows_of([node], with_sets, options)] == [reason]
    other = Unrecomputable.GRAMMAR
    assert [row.labels()["recomputable"] for row in rows_of([node], without, options)] == [other]
    unasked = replace(options, columns=())
    assert [row.labels()["recomputable"] for row in rows_of([node], with_sets, unasked)] == [other]
    missed = replace(node, replay={KEPT: 1})
    columns = {"0": column_of(0, missed, [3])}
    assert [row.labels()["recomputable"] for row in rows_of([missed], columns, options)] == [other]
