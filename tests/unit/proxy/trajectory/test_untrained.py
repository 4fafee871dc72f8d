"""Every sampled token is trained once, or counted with the reason why it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.layout_options import Freshness, LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.session_samples import SessionSamples, warnings
from proxy.types import Interaction, SessionRecord
from tests.interactions import forests, interaction
from tokengrove.options.export import Drift, Layout, Padding, Stale, TooLong, TrainedLogprobs, TrainSelection
from tokengrove.reasons import LogprobsOf

RECORD = SessionRecord("s")
CONSTRAINED = TrainSelection(constrained=True)


def forced() -> list[Interaction]:
    """The drawn example of the documentation: a free answer of 4 tokens, then a forced call of 5."""
    nodes = [
        interaction("free", suffix=[1, 2], output=[3, 4, 5, 6], seq=0),
        interaction("call", parent="free", prefix=6, suffix=[7], output=[8, 9, 10, 11, 12], seq=1),
    ]
    nodes[1].grammar = True
    return nodes


def masks(laid: SessionSamples) -> list[list[int]]:
    return [row.columns()["loss_mask"].tolist() for row in laid.rows]


def counts(nodes: list[Interaction], **options: Any) -> dict[str, Any]:
    chosen = LayoutOptions(**options)
    return lay_out(RECORD, nodes, chosen).counts(chosen)


@pytest.mark.parametrize(
    ("layout", "train", "expected"),
    [
        (Layout.CONCAT, TrainSelection(), [[0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]),
        (Layout.CONCAT, CONSTRAINED, [[0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]]),
        (Layout.TREE, TrainSelection(), [[0, 0, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0]]),
        (Layout.TREE, CONSTRAINED, [[0, 0, 1, 1, 1, 1, 0, 1, 1, 1, 1, 1]]),
        (Layout.INDIVIDUAL, TrainSelection(), [[0, 0, 1, 1, 1, 1], [0] * 12]),
        (Layout.INDIVIDUAL, CONSTRAINED, [[0, 0, 1, 1, 1, 1], [0] * 7 + [1] * 5]),
    ],
)
def test_answers_under_a_grammar_are_context_unless_they_are_asked_for(
    layout: Layout, train: TrainSelection, expected: list[list[int]]
) -> None:
    laid = lay_out(RECORD, forced(), LayoutOptions(layout=layout, train=train))
    assert masks(laid) == expected
    assert laid.ledger.untrained() == ({} if train.constrained else {"grammar": 5})
    assert [row.labels()["turns"][-1]["recomputable"] for row in laid.rows][-1] == "grammar"


def test_only_samples_that_train_anything_share_the_weight_of_a_session() -> None:
    for layout in (Layout.INDIVIDUAL, Layout.CONCAT):
        nodes = [*forced(), interaction("other", suffix=[1], output=[20], seq=2)]
        nodes[0].trainable = layout is Layout.CONCAT
        nodes += [interaction("marked", suffix=[1], output=[21], seq=3)]
        nodes[-1].trainable = False
        found = lay_out(RECORD, nodes, LayoutOptions(layout=layout))
        weights = [row.columns()["weight"].tolist() for row in found.rows]
        assert weights == ([[0.0], [0.0], [1.0], [0.0]] if layout is Layout.INDIVIDUAL else [[0.5], [0.5], [0.0]])


def test_unmasked_logprobs_stand_on_trained_tokens_only() -> None:
    nodes = forced()
    nodes[1].spans, nodes[1].unmasked_logprobs = ((1, 3),), nodes[1].logprobs.__class__("f", [-1, -2, -3, -4, -5])
    [row] = lay_out(RECORD, nodes, LayoutOptions(layout=Layout.CONCAT, train=CONSTRAINED)).rows
    assert row.columns()["unmasked_logprobs"].tolist() == [0, 0, *[-0.5] * 4, 0, 0, -2, -3, 0, 0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_logprobs": False, "trainable": False, "grammar": True}, "no_logprobs"),
        ({"trainable": False, "grammar": True}, "mark"),
        ({"trainable": False, "logprobs_of": LogprobsOf.SAMPLED}, "mark"),
        ({"logprobs_of": LogprobsOf.MODEL, "grammar": True}, "logprobs"),
        ({"grammar": True}, "grammar"),
    ],
)
def test_a_turn_has_the_first_reason_that_holds_for_all_samples(change: dict[str, Any], reason: str) -> None:
    nodes = [replace(interaction("a", output=[2, 3]), **change)]
    options = LayoutOptions(train=TrainSelection(logprobs=TrainedLogprobs.RULE))
    assert lay_out(RECORD, nodes, options).counts(options)["untrained_tokens"] == {reason: 2}
    excluded = LayoutOptions(train=TrainSelection(exclude=frozenset({"a"})))
    expected = "no_logprobs" if reason == "no_logprobs" else "train"
    assert lay_out(RECORD, nodes, excluded).ledger.untrained() == {expected: 2}
    filtered = LayoutOptions(agents=frozenset({"nobody"}))
    assert lay_out(RECORD, nodes, filtered).ledger.untrained() == {"filter": 2}


def test_an_unfinished_session_says_so() -> None:
    record, options = replace(RECORD, finished=False), LayoutOptions(mask_unfinished=True)
    assert lay_out(record, forced(), options).ledger.untrained() == {"unfinished": 9}


def test_tokens_outside_the_marked_spans_of_a_forced_answer_are_left_out_by_the_mark() -> None:
    nodes = forced()
    nodes[1].spans = ((0, 2),)
    assert lay_out(RECORD, nodes, LayoutOptions()).ledger.untrained() == {"mark": 3, "grammar": 2}


def test_dropped_samples_and_drifted_answers_are_counted() -> None:
    padding = Padding(2, 4, on_too_long=TooLong.DROP)
    told = counts(forced(), layout=Layout.PADDED, padding=padding)
    assert (told["untrained_tokens"], told["trained_tokens"]) == ({"too_long": 4, "grammar": 5}, 0)
    drifted = [
        interaction("p", suffix=[1], output=[4, 5], seq=0),
        interaction("c", parent="p", suffix=[9, 1, 7], output=[8], seq=1),
    ]
    assert counts(drifted, drift=Drift.MASK)["untrained_tokens"] == {"drift": 2}


def test_a_session_warns_if_over_half_of_its_tokens_are_lost_and_nobody_asked_for_it() -> None:
    told = counts(forced())
    assert (told["sampled_tokens"], told["trained_tokens"], told["untrained_tokens"]) == (9, 4, {"grammar": 5})
    (warning,) = told["warnings"]
    assert "5 of 9" in warning and "5 grammar" in warning and "train.constrained" in warning
    assert counts(forced(), train=CONSTRAINED)["warnings"] == []
    assert counts(forced(), train=TrainSelection(exclude=frozenset({"free", "call"})))["warnings"] == []


@pytest.mark.parametrize("layout", [Layout.CONCAT, Layout.INDIVIDUAL, Layout.TREE])
def test_a_session_warns_of_trained_tokens_whose_logprobs_are_not_by_the_rule(layout: Layout) -> None:
    nodes = forced()
    nodes[0].logprobs_of = nodes[1].logprobs_of = LogprobsOf.SAMPLED
    nodes[0].spans = ((0, 3),)
    assert counts(nodes, layout=layout, train=CONSTRAINED)["warnings"] == [
        "8 of 8 trained tokens have logprobs that are not by the rule (8 sampled), so a trainer's own logprobs differ "
        "from them; 'train.logprobs': rule does not train them"
    ]
    told = counts(nodes, layout=layout, train=TrainSelection(constrained=True, logprobs=TrainedLogprobs.RULE))
    assert (told["untrained_tokens"], told["warnings"]) == ({"mark": 1, "logprobs": 8}, [])


def test_a_warning_needs_more_than_half() -> None:
    assert list(warnings(4, {"grammar": 2})) == []
    assert list(warnings(4, {"stale": 4})) == []
    (warning,) = warnings(4, {"grammar": 2, "cut": 1})
    assert warning == (
        "3 of 4 sampled tokens are not trained: 1 cut, 2 grammar; "
        "'train.constrained': true trains those under a grammar"
    )


@given(
    forests(),
    st.sampled_from(list(Layout)),
    st.sampled_from(list(TooLong)),
    st.integers(0, 3),
    st.booleans(),
    st.sampled_from(list(Stale)),
)
def test_trained_and_untrained_tokens_are_all_that_were_sampled(
    nodes: list[Interaction], layout: Layout, too_long: TooLong, oldest: int, constrained: bool, stale: Stale
) -> None:
    for at, node in enumerate(nodes):
        node.grammar, node.versions = at % 3 == 1, ((len(node.output_ids), at),)
    padding = Padding(8, 6, on_too_long=too_long) if layout is Layout.PADDED else None
    train, limits = TrainSelection(constrained=constrained), Freshness(oldest or None, 4)
    options = LayoutOptions(layout=layout, train=train, padding=padding, freshness=limits, stale=stale)
    laid = lay_out(RECORD, nodes, options)
    found = [(c["input_ids"][c["loss_mask"] == 1]).tolist() for c in (row.columns() for row in laid.rows)]
    trained = [token for tokens in found for token in tokens]
    assert len(trained) == len(set(trained)) == laid.ledger.trained()
    assert laid.ledger.sampled() == sum(len(node.output_ids) for node in nodes)
    assert laid.ledger.sampled() == laid.ledger.trained() + sum(laid.ledger.untrained().values())
