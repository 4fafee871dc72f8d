"""Drift policies: `fork` starts a new sample at an unaligned child, `mask` finds older outputs in its prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import export_session
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.paths import find_all
from proxy.types import Interaction, SessionRecord, ids_of
from tests.interactions import interaction
from tokengrove.options.export import Drift, Layout

RECORD = SessionRecord("s", discount=1.0)


def export(nodes: list[Interaction], drift: Drift) -> list[PathSample]:
    return export_session(RECORD, nodes, LayoutOptions(layout=Layout.CONCAT, drift=drift))


def drifted(*, kept: bool) -> list[Interaction]:
    """A root with the output [4, 5], and an unaligned child whose prompt does or does not contain it as sampled."""
    middle = [4, 5] if kept else [4, 7]
    return [
        interaction("p", suffix=[1, 2, 3], output=[4, 5], seq=0, reward=0.5),
        interaction("c", parent="p", suffix=[9, 1, 2, 3, *middle, 6], output=[8], version=1, seq=1, reward=1.0),
    ]


def test_fork_trains_every_sampled_token() -> None:
    first, second = export(drifted(kept=False), Drift.FORK)
    assert [first.arrays.loss_mask.tolist(), second.arrays.loss_mask.tolist()] == [[0, 0, 0, 1, 1], [0] * 7 + [1]]
    assert first.masked_tokens == second.masked_tokens == 0


def test_mask_trains_an_older_output_that_the_prompt_contains_as_sampled() -> None:
    (sample,) = export(drifted(kept=True), Drift.MASK)
    assert sample.arrays.input_ids.tolist() == [9, 1, 2, 3, 4, 5, 6, 8]
    assert sample.arrays.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 1]
    assert sample.arrays.versions.tolist() == [-1, -1, -1, -1, 0, 0, -1, 1]
    assert (sample.masked_tokens, sample.rewards.tolist()) == (0, [1.5])
    assert [turn["recomputable"] for turn in sample.labels()["turns"]] == ["drift", None]


def test_mask_counts_an_older_output_that_the_prompt_does_not_contain() -> None:
    (sample,) = export(drifted(kept=False), Drift.MASK)
    assert sample.arrays.loss_mask.tolist() == [0] * 7 + [1]
    assert sample.masked_tokens == 2
    assert [turn["span"] for turn in sample.to_json()["turns"]] == [None, [7, 8]]
    assert [turn["recomputable"] for turn in sample.labels()["turns"]] == ["drift", None]


def test_mask_does_not_find_an_output_without_its_generation_prompt() -> None:
    """The prompt contains [4, 5], but not after the root's generation prompt."""
    nodes = drifted(kept=False)
    nodes[1] = replace_suffix(nodes[1], [4, 5, 9, 1, 2, 3, 7, 6])
    (sample,) = export(nodes, Drift.MASK)
    assert sample.masked_tokens == 2


def test_mask_trains_a_shared_output_once() -> None:
    nodes = [
        *drifted(kept=True),
        interaction("d", parent="p", prefix=5, suffix=[6], output=[7], seq=2),
    ]
    first, second = export(nodes, Drift.MASK)
    assert (int(first.arrays.loss_mask.sum()), int(second.arrays.loss_mask.sum())) == (3, 1)


def test_mask_finds_equal_outputs_at_different_places() -> None:
    """Both outputs are equal, and the text before the first one resembles the second prompt more."""
    nodes = [
        interaction("p", suffix=[1, 2, 3], output=[4, 5], seq=0),
        interaction("q", parent="p", prefix=5, suffix=[1, 2, 3], output=[4, 5], version=1, seq=1),
        interaction("r", parent="q", suffix=[5, 1, 2, 3, 4, 5, 6, 1, 2, 3, 4, 5], output=[8], version=2, seq=2),
    ]
    (sample,) = export(nodes, Drift.MASK)
    assert [turn["span"] for turn in sample.to_json()["turns"]] == [[4, 6], [10, 12], [12, 13]]
    assert sample.arrays.versions.tolist() == [-1] * 4 + [0, 0] + [-1] * 4 + [1, 1, 2]


def replace_suffix(made: Interaction, suffix: list[int]) -> Interaction:
    return replace(made, prompt_suffix=ids_of(suffix))


@pytest.mark.parametrize(
    ("ids", "wanted", "start", "found"),
    [
        ([1, 2, 3], [2, 3], 0, 1),
        ([1, 2, 3, 2, 3], [2, 3], 2, 3),
        ([1, 2, 3], [4], 0, None),
        ([0x0100, 0x0001], [0x01000001], 0, None),  # equal bytes, but not at a token boundary
        ([0x01000100, 1, 256], [256], 0, 2),
    ],
)
def test_ids_are_found_only_at_token_boundaries(
    ids: list[int], wanted: list[int], start: int, found: int | None
) -> None:
    assert next(find_all(ids_of(ids), ids_of(wanted), start), None) == found


def test_mask_prefers_the_occurrence_with_the_longest_common_text_before_it() -> None:
    nodes = [
        interaction("p", suffix=[7, 1, 2, 3], output=[4, 5], seq=0),
        interaction("c", parent="p", suffix=[9, 1, 2, 3, 4, 5, 7, 1, 2, 3, 4, 5, 6], output=[8], seq=1),
    ]
    (sample,) = export(nodes, Drift.MASK)
    assert [turn["span"] for turn in sample.to_json()["turns"]] == [[10, 12], [13, 14]]


def test_an_output_that_one_prompt_lacks_is_trained_in_a_later_sample_that_contains_it() -> None:
    nodes = [*drifted(kept=False), interaction("d", parent="p", prefix=5, suffix=[6], output=[7], seq=2)]
    first, second = export(nodes, Drift.MASK)
    assert first.arrays.loss_mask.tolist() == [0] * 7 + [1]
    assert second.arrays.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 1]


def test_an_answer_that_stands_after_its_own_prompt_is_recomputable_under_mask() -> None:
    """The template drops the second answer from the third prompt; the first still follows its own prompt."""
    nodes = [
        interaction("a", suffix=[1, 2, 3], output=[4, 5], seq=0),
        interaction("b", parent="a", prefix=5, suffix=[6], output=[7], seq=1),
        interaction("c", parent="b", suffix=[1, 2, 3, 4, 5, 6, 9], output=[8], seq=2),
    ]
    (sample,) = export(nodes, Drift.MASK)
    assert sample.arrays.loss_mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert [turn["recomputable"] for turn in sample.labels()["turns"]] == [None, "drift", None]
    assert sample.labels()["recomputable"] == "drift"
