"""Drift policies: `fork` begins a new sample with an unaligned child, `mask` finds what still stands as sampled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.trajectory.layouts import Layout, LayoutOptions, PathSample, export_session
from proxy.trajectory.paths import Drift, find_all
from proxy.types import Interaction, SessionRecord, ids_of
from tests.interactions import interaction

RECORD = SessionRecord("s", discount=1.0)


def export(nodes: list[Interaction], drift: Drift) -> list[PathSample]:
    return export_session(RECORD, nodes, LayoutOptions(Layout.CONCAT, drift=drift))


def drifted(*, kept: bool) -> list[Interaction]:
    """A root, and a child rendered in full, in whose prompt the root's answer [4, 5] stands as sampled or does not."""
    middle = [4, 5] if kept else [4, 7]
    return [
        interaction("p", suffix=[1, 2, 3], output=[4, 5], seq=0, reward=0.5),
        interaction("c", parent="p", suffix=[9, 1, 2, 3, *middle, 6], output=[8], version=1, seq=1, reward=1.0),
    ]


def test_fork_loses_nothing() -> None:
    first, second = export(drifted(kept=False), Drift.FORK)
    assert [first.arrays.loss_mask.tolist(), second.arrays.loss_mask.tolist()] == [[0, 0, 0, 1, 1], [0] * 7 + [1]]
    assert first.masked_tokens == second.masked_tokens == 0


def test_mask_joins_what_stands_as_sampled() -> None:
    (sample,) = export(drifted(kept=True), Drift.MASK)
    assert sample.arrays.input_ids.tolist() == [9, 1, 2, 3, 4, 5, 6, 8]
    assert sample.arrays.loss_mask.tolist() == [0, 0, 0, 0, 1, 1, 0, 1]
    assert sample.arrays.versions.tolist() == [-1, -1, -1, -1, 0, 0, -1, 1]
    assert (sample.masked_tokens, sample.rewards.tolist()) == (0, [1.5])


def test_mask_makes_context_of_what_does_not_and_counts_it() -> None:
    (sample,) = export(drifted(kept=False), Drift.MASK)
    assert sample.arrays.loss_mask.tolist() == [0] * 7 + [1]
    assert sample.masked_tokens == 2
    assert [turn["span"] for turn in sample.to_json()["turns"]] == [None, [7, 8]]


def test_mask_does_not_take_the_same_tokens_elsewhere_for_an_answer() -> None:
    """[4, 5] stands in the prompt, but not behind the root's generation prompt."""
    nodes = drifted(kept=False)
    nodes[1] = replace_suffix(nodes[1], [4, 5, 9, 1, 2, 3, 7, 6])
    (sample,) = export(nodes, Drift.MASK)
    assert sample.masked_tokens == 2


def test_mask_trains_a_shared_answer_once() -> None:
    nodes = [
        *drifted(kept=True),
        interaction("d", parent="p", prefix=5, suffix=[6], output=[7], seq=2),
    ]
    first, second = export(nodes, Drift.MASK)
    assert (int(first.arrays.loss_mask.sum()), int(second.arrays.loss_mask.sum())) == (3, 1)


def test_mask_gives_equal_answers_a_place_each_though_both_fit_the_first_best() -> None:
    """The second answer is the first one over again, and what stands before the first is more like its own prompt."""
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
        ([0x0100, 0x0001], [0x01000001], 0, None),  # the same bytes, but not at a token's border
        ([0x01000100, 1, 256], [256], 0, 2),
    ],
)
def test_ids_are_found_at_the_borders_of_tokens_only(
    ids: list[int], wanted: list[int], start: int, found: int | None
) -> None:
    assert next(find_all(ids_of(ids), ids_of(wanted), start), None) == found
