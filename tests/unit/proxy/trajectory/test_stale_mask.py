"""`stale: mask`: tokens older than `min_version` are context in every sample, and their samples are kept."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.layout_options import Freshness, LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.sample_row import SampleRow
from proxy.trajectory.session_samples import SessionSamples
from proxy.types import Interaction, SessionRecord
from tests.interactions import forests, interaction
from tokengrove.options.export import (
    Drift,
    Include,
    Keep,
    Layout,
    Padding,
    Stale,
    TooLong,
    TrainSelection,
    TurnSelection,
    Unrewarded,
)
from tokengrove.options.session import RewardScope, SessionStatus
from tokengrove.reasons import LogprobsOf, Untrained

ENDED = SessionRecord("s", discount=0.5, status=SessionStatus.ENDED)
SAMPLE_REASONS = (Untrained.DRIFT, Untrained.UNREWARDED, Untrained.TOO_LONG, Untrained.CUT)
PER_TOKEN = ("loss_mask", "response_mask", "logprobs", "rollout_log_probs", "versions", "turn_ids", "unmasked_logprobs")


def fork() -> list[Interaction]:
    """The drawn example of the documentation: root (version 0) has children a (3) and b (1); other (4) is a root."""
    return [
        interaction("root", suffix=[1], output=[2], seq=0, reward=1.0),
        interaction("a", parent="root", prefix=2, suffix=[3], output=[4], seq=1, version=3),
        interaction("b", parent="root", prefix=2, suffix=[5], output=[6], seq=2, version=1),
        interaction("other", suffix=[7], output=[8], seq=3, version=4),
    ]


def changed(name: str = "root", **fields: Any) -> list[Interaction]:
    """The drawn example with other fields of one turn."""
    return [replace(node, **fields) if node.id == name else node for node in fork()]


def masked(
    nodes: list[Interaction], min_version: int = 2, span: int | None = None, **options: Any
) -> tuple[SessionSamples, dict[str, Any]]:
    """Lay out with the mask; return the samples and the counts of the session."""
    chosen = LayoutOptions(freshness=Freshness(min_version, span), stale=Stale.MASK, **options)
    laid = lay_out(ENDED, nodes, chosen)
    return laid, laid.counts(chosen)


def column(laid: SessionSamples, name: str) -> list[Any]:
    return [row.columns()[name].tolist() for row in laid.rows]


@pytest.mark.parametrize(
    ("layout", "masks", "weights", "counted"),
    [
        (Layout.CONCAT, [[0, 0, 0, 1], [0] * 4, [0, 1]], [0.5, 0, 0.5], {"stale_samples": 0}),
        (Layout.INDIVIDUAL, [[0, 0], [0, 0, 0, 1], [0] * 4, [0, 1]], [0, 0.5, 0, 0.5], {"stale_samples": 0}),
        (Layout.TREE, [[0, 0, 0, 1, 0, 0, 0, 1]], [1], {"stale_turns": 2}),
        (
            Layout.PADDED,
            [[0, 0, 0, 0, 0, 1], [0] * 6, [0, 0, 0, 1, 0, 0]],
            [0.5, 0, 0.5],
            {"stale_samples": 0, "dropped_samples": 0},
        ),
    ],
)
def test_old_tokens_are_masked_and_every_sample_is_kept(
    layout: Layout, masks: list[list[int]], weights: list[float], counted: dict[str, int]
) -> None:
    padding = Padding(3, 3) if layout is Layout.PADDED else None
    laid, told = masked(fork(), layout=layout, padding=padding)
    assert column(laid, "loss_mask") == masks
    assert column(laid, "weight") == [[weight] for weight in weights]
    assert (told["trained_tokens"], told["untrained_tokens"], told["warnings"]) == (2, {"stale": 2}, [])
    assert {name: told[name] for name in counted} == counted


def test_the_drawn_example_drops_two_samples_by_default() -> None:
    options = LayoutOptions(freshness=Freshness(2))
    laid = lay_out(ENDED, fork(), options)
    told = laid.counts(options)
    assert (column(laid, "loss_mask"), column(laid, "weight")) == ([[0, 1]], [[1]])
    assert (told["stale_samples"], told["untrained_tokens"]) == (2, {"stale": 3})


@pytest.mark.parametrize("layout", [Layout.CONCAT, Layout.INDIVIDUAL, Layout.TREE])
def test_an_answer_that_spans_an_update_is_masked_up_to_it(layout: Layout) -> None:
    node = interaction("x", suffix=[1], output=[2, 3, 4])
    node.versions, node.unmasked_logprobs = ((1, 4), (2, 5)), array("f", [-1, -2, -3])
    laid, told = masked([node], 5, layout=layout)
    assert {name: column(laid, name) for name in PER_TOKEN if name in laid.rows[0].columns()} == {
        "loss_mask": [[0, 0, 1, 1]],
        "logprobs": [[0, 0, -0.5, -0.5]],
        "versions": [[-1, -1, 5, 5]],
        "turn_ids": [[-1, -1, 0, 0]],
        "unmasked_logprobs": [[0, 0, -2, -3]],
    }
    assert told["untrained_tokens"] == {"stale": 1}
    assert laid.ledger.runs("x") == [(0, 1, Untrained.STALE), (1, 3, None)]


@pytest.mark.parametrize("layout", [Layout.CONCAT, Layout.INDIVIDUAL, Layout.TREE])
@pytest.mark.parametrize("oldest", [0, 3])
def test_a_turn_with_an_uncertain_version_is_masked_as_a_whole(layout: Layout, oldest: int) -> None:
    laid, told = masked(changed("a", uncertain=True), oldest, layout=layout)
    assert told["untrained_tokens"] == {"stale": 1 if oldest == 0 else 3}
    assert [laid.ledger.trained_of(name) for name in ("a", "other")] == [0, 1]


@pytest.mark.parametrize(
    ("layout", "oldest", "span", "trained", "stale"),
    [
        (Layout.CONCAT, 1, 2, [[3], [1], [4]], 0),  # with the root, a would span 3
        (Layout.CONCAT, 0, 2, [[0, 1], [4]], 1),  # a is left out, and b trains the root
        (Layout.TREE, 1, 2, [[3, 1, 4]], 1),  # the root is masked
        (Layout.TREE, 0, 2, [[0, 1, 4]], 1),  # the path of a spans 3
        (Layout.INDIVIDUAL, 4, 0, [[], [], [], [4]], 0),
    ],
)
def test_the_span_is_that_of_the_tokens_that_are_still_trained(
    layout: Layout, oldest: int, span: int, trained: list[list[int]], stale: int
) -> None:
    laid, told = masked(fork(), oldest, span, layout=layout)
    found = [c["versions"][c["loss_mask"] == 1].tolist() for c in (row.columns() for row in laid.rows)]
    assert (found, told["stale_turns" if layout is Layout.TREE else "stale_samples"]) == (trained, stale)


@pytest.mark.parametrize(
    ("nodes", "options", "untrained"),
    [
        (changed(trainable=False), {}, {"mark": 1, "stale": 1}),
        (changed(grammar=True), {}, {"grammar": 1, "stale": 1}),
        (changed(has_logprobs=False), {}, {"no_logprobs": 1, "stale": 1}),
        (fork(), {"train": TrainSelection(exclude=frozenset({"root", "b"}))}, {"train": 2}),
        (fork(), {"agents": frozenset({"nobody"})}, {"filter": 4}),
        (
            fork(),
            {"unrewarded": Unrewarded.SKIP, "reward_scope": RewardScope.PATH},
            {"unrewarded": 1, "stale": 2},
        ),
        (
            fork(),
            {"layout": Layout.PADDED, "padding": Padding(2, 1, on_too_long=TooLong.DROP)},
            {"too_long": 1, "stale": 2},
        ),
    ],
)
def test_a_masked_token_has_the_reason_that_the_documented_table_gives_it(
    nodes: list[Interaction], options: dict[str, Any], untrained: dict[str, int]
) -> None:
    _, told = masked(nodes, **options)
    assert told["untrained_tokens"] == untrained


def test_a_lost_answer_that_is_old_is_stale() -> None:
    drifted = [
        interaction("p", suffix=[1], output=[4, 5], seq=0),
        interaction("c", parent="p", suffix=[9, 1, 7], output=[8], seq=1, version=2),
    ]
    assert masked(drifted, drift=Drift.MASK)[1]["untrained_tokens"] == {"stale": 2}
    assert masked(drifted, 0, drift=Drift.MASK)[1]["untrained_tokens"] == {"drift": 2}


def test_only_trained_tokens_are_warned_of() -> None:
    nodes = changed(logprobs_of=LogprobsOf.SAMPLED)
    laid, told = masked(nodes)
    assert told["warnings"] == [] and {row.labels()["logprobs_of"] for row in laid.rows} == {"rule"}
    assert "1 of 4 trained tokens" in masked(nodes, 0)[1]["warnings"][0]


PADDINGS = st.builds(
    Padding,
    st.integers(1, 8),
    st.integers(1, 8),
    st.just(0),
    st.sampled_from([TooLong.DROP, TooLong.TRUNCATE]),
    st.sampled_from(list(Keep)),
)


@st.composite
def aged(draw: st.DrawFn) -> list[Interaction]:
    """Trees whose tokens differ, of versions 0 to 4 that change within answers. Some are uncertain, some rewarded."""
    nodes = draw(forests())
    for node in nodes:
        first = draw(st.integers(0, len(node.output_ids)))
        old, new = sorted((draw(st.integers(0, 4)), draw(st.integers(0, 4))))
        runs = ((first, old), (len(node.output_ids) - first, new))
        node.versions = tuple(run for run in runs if run[0])
        node.uncertain, node.grammar = draw(st.integers(0, 5)) == 0, draw(st.integers(0, 5)) == 0
        node.reward = draw(st.sampled_from([None, 1.0, -0.5]))
    return nodes


@st.composite
def exports(draw: st.DrawFn) -> LayoutOptions:
    """Options of any layout, without limits on versions."""
    layout = draw(st.sampled_from(list(Layout)))
    skips = draw(st.booleans())
    return LayoutOptions(
        layout=layout,
        padding=draw(PADDINGS) if layout is Layout.PADDED else None,
        drift=Drift.FORK if layout is Layout.TREE else draw(st.sampled_from(list(Drift))),
        train=TrainSelection(turns=draw(st.sampled_from(list(TurnSelection))), constrained=draw(st.booleans())),
        unrewarded=Unrewarded.SKIP if skips else Unrewarded.ZERO,
        reward_scope=draw(st.sampled_from([None, RewardScope.PATH, RewardScope.SESSION])),
        include=frozenset({Include.MESSAGES}),
    )


def ages(nodes: list[Interaction]) -> dict[int, int]:
    """The version of each sampled token by its id; -1 if it is uncertain."""
    found: dict[int, int] = {}
    for node in nodes:
        versions = [version for count, version in node.versions for _ in range(count)]
        found |= zip(node.output_ids, [-1] * len(versions) if node.uncertain else versions, strict=True)
    return found


def described(row: SampleRow) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a row has besides what its mask determines."""
    labels, columns = row.labels(), row.columns()
    labels.pop("logprobs_of")
    return labels, {name: each.tolist() for name, each in columns.items() if name not in (*PER_TOKEN, "weight")}


@given(aged(), exports(), st.integers(0, 5))
def test_the_mask_takes_exactly_the_old_tokens_from_an_export_without_limits(
    nodes: list[Interaction], options: LayoutOptions, oldest: int
) -> None:
    plain = lay_out(ENDED, nodes, options)
    limited = replace(options, freshness=Freshness(oldest), stale=Stale.MASK)
    laid, age = lay_out(ENDED, nodes, limited), ages(nodes)
    assert [described(row) for row in laid.rows] == [described(row) for row in plain.rows]
    for ours, theirs in zip(laid.rows, plain.rows, strict=True):
        found, before = ours.columns(), theirs.columns()
        recent = np.array([age.get(token, -1) >= oldest for token in found["input_ids"].tolist()])
        assert found["loss_mask"].tolist() == (before["loss_mask"] * recent).tolist()
        for name, context in (("logprobs", 0), ("versions", -1), ("turn_ids", -1)):
            assert found[name].tolist() == np.where(found["loss_mask"] == 1, before[name], context).tolist()
    check_weights(laid)
    check_ledger(nodes, laid, plain, oldest)
    assert (laid.masked_tokens, laid.dropped, laid.unrewarded) == (plain.masked_tokens, plain.dropped, plain.unrewarded)
    stale = sum(any(reason is Untrained.STALE for *_, reason in laid.ledger.runs(node.id)) for node in nodes)
    assert laid.stale == (stale if options.layout is Layout.TREE and laid.rows else 0)


def check_weights(laid: SessionSamples) -> None:
    trains = [bool(row.columns()["loss_mask"].any()) for row in laid.rows]
    share = np.float32(1 / max(sum(trains), 1))
    assert column(laid, "weight") == [[share if train else 0.0] for train in trains]


def check_ledger(nodes: list[Interaction], laid: SessionSamples, plain: SessionSamples, oldest: int) -> None:
    """Each token has the reason that it has without limits; stale replaces training, and reasons of samples."""
    age = ages(nodes)
    for node in nodes:
        found, before = reasons(laid, node), reasons(plain, node)
        for token, reason, earlier in zip(node.output_ids, found, before, strict=True):
            may_change = earlier is None or earlier in SAMPLE_REASONS
            assert reason == (Untrained.STALE if may_change and age[token] < oldest else earlier)
    ledger = laid.ledger
    assert ledger.sampled() == ledger.trained() + sum(ledger.untrained().values())
    assert ledger.trained() == sum(int(row.columns()["loss_mask"].sum()) for row in laid.rows)


def reasons(laid: SessionSamples, node: Interaction) -> list[Untrained | None]:
    return [reason for first, end, reason in laid.ledger.runs(node.id) for _ in range(first, end)]


@given(aged(), exports(), st.integers(0, 4), st.integers(0, 3))
def test_with_a_span_no_old_token_is_trained_and_the_ledger_adds_up(
    nodes: list[Interaction], options: LayoutOptions, oldest: int, span: int
) -> None:
    limited = replace(options, freshness=Freshness(oldest, span), stale=Stale.MASK)
    laid, age = lay_out(ENDED, nodes, limited), ages(nodes)
    trained = [c["input_ids"][c["loss_mask"] == 1].tolist() for c in (row.columns() for row in laid.rows)]
    assert all(age[token] >= oldest for tokens in trained for token in tokens)
    spans = [max(versions) - min(versions) for versions in ([age[token] for token in each] for each in trained if each)]
    assert options.layout is Layout.TREE or all(each <= span for each in spans)
    ledger = laid.ledger
    assert ledger.trained() == sum(map(len, trained))
    assert ledger.sampled() == ledger.trained() + sum(ledger.untrained().values())


@given(aged(), exports(), st.integers(0, 5), st.integers(0, 3) | st.none())
def test_an_export_that_masks_nothing_equals_one_that_drops_nothing(
    nodes: list[Interaction], options: LayoutOptions, oldest: int, span: int | None
) -> None:
    for node in nodes:
        node.uncertain = False
        node.versions = tuple((count, version + oldest) for count, version in node.versions)
    dropping = replace(options, freshness=Freshness(oldest, span))
    masking = replace(dropping, stale=Stale.MASK)
    found, expected = (
        [(row.labels(), {name: each.tolist() for name, each in row.columns().items()}) for row in laid.rows]
        for laid in (lay_out(ENDED, nodes, masking), lay_out(ENDED, nodes, dropping))
    )
    assert found == expected
    assert lay_out(ENDED, nodes, masking).counts(masking) == lay_out(ENDED, nodes, dropping).counts(dropping)
