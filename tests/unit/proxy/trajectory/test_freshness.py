"""Stale samples are left out and counted; their shared tokens are trained in the next fresh sample, if any."""

from __future__ import annotations

import pytest

from proxy.trajectory.layout_options import Freshness, LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.session_samples import SessionSamples
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tokengrove.options.export import Layout, TrainSelection


def fork() -> list[Interaction]:
    """root (version 0) has the children a (version 3) and b (version 1); other (version 4) is a second root."""
    return [
        interaction("root", suffix=[1], output=[2], seq=0),
        interaction("a", parent="root", prefix=2, suffix=[3], output=[4], seq=1, version=3),
        interaction("b", parent="root", prefix=2, suffix=[5], output=[6], seq=2, version=1),
        interaction("other", suffix=[7], output=[8], seq=3, version=4),
    ]


def lay(layout: Layout, train: TrainSelection | None = None, **freshness: int) -> SessionSamples:
    options = LayoutOptions(layout=layout, train=train or TrainSelection(), freshness=Freshness(**freshness))
    return lay_out(SessionRecord("s"), fork(), options)


def trained(laid: SessionSamples) -> dict[str, list[int]]:
    """The weight versions of the trained tokens of each sample."""
    found = {}
    for row in laid.rows:
        columns = row.columns()
        found[row.labels()["interaction_id"]] = columns["versions"][columns["loss_mask"] == 1].tolist()
    return found


def test_without_limits_every_sample_is_fresh() -> None:
    laid = lay(Layout.CONCAT)
    assert (trained(laid), laid.stale) == ({"a": [0, 3], "b": [1], "other": [4]}, 0)


@pytest.mark.parametrize(
    ("freshness", "expected", "stale"),
    [
        ({"max_version_span": 3}, {"a": [0, 3], "b": [1], "other": [4]}, 0),
        ({"max_version_span": 2}, {"b": [0, 1], "other": [4]}, 1),
        ({"max_version_span": 0}, {"other": [4]}, 2),
        ({"min_version": 1}, {"other": [4]}, 2),
        ({"min_version": 0}, {"a": [0, 3], "b": [1], "other": [4]}, 0),
        ({"min_version": 5}, {}, 3),
    ],
)
def test_a_stale_sample_of_concat_gives_its_shared_tokens_to_the_next_fresh_one(
    freshness: dict[str, int], expected: dict[str, list[int]], stale: int
) -> None:
    laid = lay(Layout.CONCAT, **freshness)
    assert (trained(laid), laid.stale) == (expected, stale)


def test_individual_samples_are_filtered_one_by_one() -> None:
    laid = lay(Layout.INDIVIDUAL, min_version=2, max_version_span=0)
    assert (trained(laid), laid.stale) == ({"a": [3], "other": [4]}, 2)


@pytest.mark.parametrize(
    ("freshness", "turns", "versions", "stale"),
    [
        ({"max_version_span": 3}, ["root", "a", "b", "other"], [0, 3, 1, 4], 0),
        ({"max_version_span": 2}, ["root", "b", "other"], [0, 1, 4], 1),
        ({"max_version_span": 0}, ["other"], [4], 3),
        ({"min_version": 1}, ["root", "a", "b", "other"], [3, 1, 4], 1),
        ({"min_version": 2}, ["root", "a", "other"], [3, 4], 2),
        ({"min_version": 2, "max_version_span": 0}, ["root", "a", "other"], [3, 4], 2),
    ],
)
def test_a_tree_leaves_out_stale_turns_and_paths_and_keeps_the_rest(
    freshness: dict[str, int], turns: list[str], versions: list[int], stale: int
) -> None:
    laid = lay(Layout.TREE, **freshness)
    (row,) = laid.rows
    assert row.labels()["interaction_ids"] == turns
    assert trained(laid) == {turns[-1]: versions}
    assert (laid.stale, laid.ledger.untrained()) == (stale, {"stale": stale} if stale else {})


def test_a_tree_without_a_fresh_turn_has_no_sample() -> None:
    laid = lay(Layout.TREE, min_version=5)
    assert (list(laid.rows), laid.stale, laid.ledger.untrained()) == ([], 4, {"stale": 4})


def test_one_stale_token_costs_a_tree_its_turn_only() -> None:
    nodes = [
        interaction("first", suffix=[1], output=[2], seq=0, version=5),
        interaction("old", parent="first", prefix=2, suffix=[3], output=[4, 5, 6], seq=1),
        interaction("last", parent="old", prefix=6, suffix=[7], output=[8], seq=2, version=5),
    ]
    nodes[1].versions = ((1, 4), (2, 5))
    laid = lay_out(SessionRecord("s"), nodes, LayoutOptions(layout=Layout.TREE, freshness=Freshness(min_version=5)))
    (row,) = laid.rows
    assert row.columns()["loss_mask"].tolist() == [0, 1, 0, 0, 0, 0, 0, 1]
    assert (laid.stale, laid.ledger.untrained()) == (1, {"stale": 3})


def test_context_may_be_of_any_version() -> None:
    laid = lay(Layout.CONCAT, train=TrainSelection(exclude=frozenset({"root"})), min_version=1)
    assert (trained(laid), laid.stale) == ({"a": [3], "b": [1], "other": [4]}, 0)
    laid = lay(Layout.CONCAT, train=TrainSelection(exclude=frozenset({"root", "b"})), min_version=3)
    assert trained(laid) == {"a": [3], "b": [], "other": [4]}


def test_weights_add_up_to_one_over_the_fresh_samples() -> None:
    weights = [row.columns()["weight"].tolist() for row in lay(Layout.CONCAT, max_version_span=2).rows]
    assert weights == [[0.5], [0.5]]


def test_one_output_of_two_versions_has_a_version_span() -> None:
    node = interaction("x", suffix=[1], output=[2, 3, 4])
    node.versions = ((1, 5), (2, 7))
    for span, count in ((1, 0), (2, 1)):
        options = LayoutOptions(layout=Layout.INDIVIDUAL, freshness=Freshness(max_version_span=span))
        assert len(lay_out(SessionRecord("s"), [node], options).rows) == count
