"""Layouts tree and padded: no token is lost or trained twice, and the schema describes every row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given

from proxy.trajectory.columns import columns_of
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.types import Interaction, SessionRecord
from tests import golden
from tests.interactions import forests, interaction
from tokengrove.options.export import Baseline, Drift, Keep, Layout, Padding, TooLong

RECORD = SessionRecord("s", discount=1.0, group_id="g")


def fork() -> list[Interaction]:
    """A root, two children that are aligned with it, and one that is not."""
    return [
        interaction("root", suffix=[1, 2], output=[3, 4], seq=0, reward=0.5),
        interaction("a", parent="root", prefix=4, suffix=[5], output=[6, 7], version=1, seq=1, reward=1.0),
        interaction("b", parent="root", prefix=4, suffix=[8], output=[9], seq=2),
        interaction("c", parent="root", suffix=[1, 9, 9], output=[10], seq=3),
    ]


def padded(nodes: list[Interaction], prompt: int, response: int, **more: Any) -> list[dict[str, Any]]:
    options = LayoutOptions(layout=Layout.PADDED, padding=Padding(prompt, response, **more))
    return [row.columns() for row in lay_out(RECORD, nodes, options).rows]


def test_a_tree_has_each_token_once_with_parents_positions_and_masks() -> None:
    (row,) = lay_out(RECORD, fork(), LayoutOptions(layout=Layout.TREE)).rows
    columns = {name: values.tolist() for name, values in row.columns().items()}
    assert columns["input_ids"] == [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 9, 9, 10]
    assert columns["loss_mask"] == [0, 0, 1, 1, 0, 1, 1, 0, 1, 0, 0, 0, 1]
    assert columns["position_ids"] == [0, 1, 2, 3, 4, 5, 6, 4, 5, 0, 1, 2, 3]
    assert columns["turn_ids"] == [-1, -1, 0, 0, -1, 1, 1, -1, 2, -1, -1, -1, 3]
    assert columns["versions"] == [-1, -1, 0, 0, -1, 1, 1, -1, 0, -1, -1, -1, 0]
    assert (columns["node_offsets"], columns["node_parents"]) == ([0, 4, 7, 9, 13], [-1, 0, 0, -1])
    assert columns["node_positions"] == [0, 4, 4, 0]
    assert (columns["node_rewards"], columns["rewards"]) == ([0.5, 1.0, 0.0, 0.0], [1.5])
    assert columns["node_returns"] == pytest.approx([0.5 + 1 / 3, 1.0, 0.0, 0.0])


def test_a_turn_without_tokens_has_a_position_in_the_tree() -> None:
    root = interaction("root", suffix=[1, 2], output=[3, 4], seq=0)
    nothing = interaction("nothing", parent="root", prefix=4, suffix=[], output=[], seq=1)
    more = interaction("more", parent="root", suffix=[5], output=[6], seq=2)
    for nodes, positions in (([root, nothing], [0, 4]), ([root, nothing, more], [0, 4, 0])):
        (row,) = lay_out(RECORD, nodes, LayoutOptions(layout=Layout.TREE)).rows
        assert row.columns()["node_positions"].tolist() == positions
        assert row.columns()["node_offsets"].tolist() == [0, 4, 4, 6][: len(nodes) + 1]


def test_the_paths_of_a_tree_are_the_samples_of_concat() -> None:
    (row,) = lay_out(RECORD, fork(), LayoutOptions(layout=Layout.TREE)).rows
    tree = row.columns()
    for sample, node in zip(lay_out(RECORD, fork(), LayoutOptions(layout=Layout.CONCAT)).rows, (1, 2, 3), strict=True):
        path = []
        while node >= 0:
            path.append(node)
            node = int(tree["node_parents"][node])
        spans = [range(tree["node_offsets"][at], tree["node_offsets"][at + 1]) for at in reversed(path)]
        tokens = [at for span in spans for at in span]
        assert tree["input_ids"][tokens].tolist() == sample.columns()["input_ids"].tolist()
        assert tree["position_ids"][tokens].tolist() == list(range(len(tokens)))


@given(forests())
def test_trees_and_concat_train_each_trainable_token_exactly_once(nodes: list[Interaction]) -> None:
    expected = sum((1 if node.spans else len(node.output_ids)) for node in nodes if node.trainable)
    for layout in (Layout.CONCAT, Layout.TREE):
        rows = lay_out(RECORD, nodes, LayoutOptions(layout=layout)).rows
        assert sum(int(row.columns()["loss_mask"].sum()) for row in rows) == expected
        weights = sum(row.columns()["weight"].item() for row in rows)
        assert weights == pytest.approx(1.0 if expected else 0.0)
    (row,) = lay_out(RECORD, nodes, LayoutOptions(layout=Layout.TREE)).rows
    assert len(row.columns()["input_ids"]) == sum(len(n.prompt_suffix) + len(n.output_ids) for n in nodes)


def test_a_tree_keeps_the_ancestors_of_a_selected_node_as_context() -> None:
    nodes = fork()
    nodes[1].agent = "x"
    (row,) = lay_out(RECORD, nodes, LayoutOptions(layout=Layout.TREE, agents=frozenset({"x"}))).rows
    assert row.columns()["input_ids"].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert row.columns()["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1, 1]
    assert lay_out(RECORD, [], LayoutOptions(layout=Layout.TREE)).rows == []


@pytest.mark.parametrize("case", golden.load("padded"))
def test_padded_columns_are_the_golden_ones(case: dict[str, Any]) -> None:
    prompt, output, reward = case["interaction"]
    (columns,) = padded([interaction("a", suffix=prompt, output=output, reward=reward)], *case["lengths"])
    assert {name: columns[name].tolist() for name in case["columns"]} == case["columns"]


def test_padded_rows_have_the_types_of_verl_batches() -> None:
    (columns,) = padded([interaction("a", suffix=[1, 2, 3, 4], output=[5])], 8, 3)
    assert [columns[name].item() for name in ("prompt_lengths", "response_lengths")] == [4, 1]
    for name in ("prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids"):
        assert columns[name].dtype == np.int64, name
    for name in ("rollout_log_probs", "rm_scores"):
        assert columns[name].dtype == np.float32, name


def test_padded_responses_contain_tool_results_with_mask_and_logprob_0() -> None:
    (columns, *_) = padded(fork()[:2], 3, 6, pad_token_id=99)
    assert columns["prompts"].tolist() == [99, 1, 2]
    assert columns["responses"].tolist() == [3, 4, 5, 6, 7, 99]
    assert columns["response_mask"].tolist() == [1, 1, 0, 1, 1, 0]
    assert columns["rollout_log_probs"].tolist() == [-0.5, -0.5, 0, -0.5, -0.5, 0]
    assert columns["rm_scores"].tolist() == [0, 0, 0, 0, 1.5, 0]
    assert columns["__num_turns__"].tolist() == [4]
    assert columns["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 1, 1, 0]
    assert columns["versions"].tolist() == [-1, -1, -1, 0, 0, -1, 1, 1, -1]


@pytest.mark.parametrize(
    ("keep", "kept", "mask"),
    [(Keep.HEAD, [3, 4, 5], [1, 1, 0]), (Keep.MIDDLE, [4, 5, 6], [1, 0, 1]), (Keep.TAIL, [5, 6, 7], [0, 1, 1])],
)
def test_a_truncated_sample_keeps_the_chosen_part_and_counts_the_rest(
    keep: Keep, kept: list[int], mask: list[int]
) -> None:
    padding = Padding(1, 3, on_too_long=TooLong.TRUNCATE, keep=keep)
    (row,) = lay_out(RECORD, fork()[:2], LayoutOptions(layout=Layout.PADDED, padding=padding)).rows
    columns = row.columns()
    assert columns["prompts"].tolist() == [2]
    assert (columns["responses"].tolist(), columns["response_mask"].tolist()) == (kept, mask)
    assert columns["rm_scores"].tolist() == [0, 0, 1.5]
    assert row.labels()["truncated_tokens"] == 1 + 2


def test_a_dropped_sample_is_counted_and_its_shared_tokens_are_trained_elsewhere() -> None:
    padding = Padding(2, 4, on_too_long=TooLong.DROP)
    laid = lay_out(RECORD, fork(), LayoutOptions(layout=Layout.PADDED, padding=padding))
    assert [row.labels()["interaction_id"] for row in laid.rows] == ["b"]
    assert laid.dropped == 2 and laid.rows[0].columns()["weight"].tolist() == [1.0]
    assert laid.rows[0].columns()["response_mask"].tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("advantages", [None, Baseline.GRPO])
@pytest.mark.parametrize("rare", [False, True])
@pytest.mark.parametrize("layout", list(Layout))
def test_rows_have_the_columns_of_the_schema(layout: Layout, advantages: Baseline | None, rare: bool) -> None:
    padding = Padding(4, 8) if layout is Layout.PADDED else None
    nodes = fork()
    if rare:
        for node in nodes:
            node.token_rewards = node.unmasked_logprobs = node.logprobs
    options = LayoutOptions(layout=layout, advantages=advantages, step_advantages=advantages, padding=padding)
    for row in lay_out(RECORD, nodes, options).rows:
        columns = row.columns()
        expected = {column.name: column for column in columns_of(options)}
        assert set(expected) - set(columns) == (set() if rare else {"token_rewards", "unmasked_logprobs"})
        for name, values in columns.items():
            assert values.dtype == expected[name].dtype, name
            assert values.ndim == 1 and expected[name].width in (None, len(values)), name


def test_with_drift_mask_the_padded_sample_is_the_last_prompt_and_output() -> None:
    nodes = [
        interaction("p", suffix=[1, 2, 3], output=[4, 5], seq=0),
        interaction("c", parent="p", suffix=[9, 1, 2, 3, 4, 5, 6], output=[8], seq=1),
    ]
    options = LayoutOptions(layout=Layout.PADDED, drift=Drift.MASK, padding=Padding(4, 4))
    (row,) = lay_out(RECORD, nodes, options).rows
    assert row.columns()["prompts"].tolist() == [9, 1, 2, 3]
    assert row.columns()["response_mask"].tolist() == [1, 1, 0, 1]


def test_the_raw_reward_of_a_tree_is_that_of_its_last_turn() -> None:
    nodes = fork()
    nodes[-1].reward = 0.25
    (row,) = lay_out(RECORD, nodes, LayoutOptions(layout=Layout.TREE)).rows
    assert row.columns()["raw_rewards"].tolist() == [0.25]


def test_a_sample_whose_trained_tokens_are_cut_off_has_weight_0() -> None:
    nodes = fork()[:3]
    nodes[0].trainable = False
    nodes[1].spans = ((1, 2),)
    rows = padded(nodes, 2, 4, on_too_long=TooLong.TRUNCATE)
    assert [row["response_mask"].tolist() for row in rows] == [[0, 0, 0, 0], [0, 0, 0, 1]]
    assert [row["weight"].tolist() for row in rows] == [[0.0], [1.0]]


def test_the_middle_of_a_response_with_an_odd_surplus_begins_after_the_smaller_half() -> None:
    (row,) = padded([interaction("a", output=[2, 3, 4, 5, 6])], 1, 2, on_too_long=TooLong.TRUNCATE, keep=Keep.MIDDLE)
    assert row["responses"].tolist() == [3, 4]
