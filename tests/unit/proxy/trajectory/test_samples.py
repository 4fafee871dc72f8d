"""Samples of layouts individual and concat, their rewards and certificates, on interactions made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.layouts import export_session, lay_out
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.summary import certificate
from proxy.types import Interaction, SamplingParams, SessionRecord
from tests import golden
from tests.interactions import interaction
from tokengrove.options.export import Layout
from tokengrove.options.session import Credit
from tokengrove.reasons import LogprobsOf, Status

RECORD = SessionRecord("s", discount=1.0)


def export(nodes: list[Interaction], layout: Layout, discount: float | None = None) -> list[PathSample]:
    return export_session(RECORD, nodes, LayoutOptions(layout=layout, discount=discount))


def pair(**child: float) -> list[Interaction]:
    return [
        interaction("p", suffix=[1, 2, 3], output=[4, 5], version=0, seq=0, reward=child.get("first")),
        interaction(
            "c", parent="p", prefix=5, suffix=[6, 7], output=[8, 9], version=1, seq=1, reward=child.get("second", 1.0)
        ),
    ]


def built(row: list[Any]) -> Interaction:
    name, parent, prefix, suffix, output, version, reward = row
    return interaction(name, parent=parent, prefix=prefix, suffix=suffix, output=output, version=version, reward=reward)


@pytest.mark.parametrize("case", golden.load("concat"))
def test_concat_and_individual_samples_are_the_golden_ones(case: dict[str, Any]) -> None:
    nodes = [built(row) for row in case["interactions"]]
    for seq, node in enumerate(nodes):
        node.seq = seq
    samples = export(nodes, Layout.CONCAT)
    assert len(samples) == len(case["concat"])
    for sample, expected in zip(samples, case["concat"], strict=True):
        for name in ("input_ids", "loss_mask", "versions", "turn_ids"):
            assert getattr(sample.arrays, name).tolist() == expected[name], name
        assert (sample.rewards.tolist(), sample.raw_rewards.tolist()) == (expected["rewards"], expected["raw_rewards"])
        assert list(sample.returns) == expected["returns"]
    singles = export(nodes, Layout.INDIVIDUAL)
    assert [single.rewards.item() for single in singles] == case["individual"]["rewards"]
    assert [single.raw_rewards.item() for single in singles] == case["individual"]["raw_rewards"]


def test_logprobs_and_spans_of_a_joined_sample_are_those_of_its_turns() -> None:
    (sample,) = export(pair(), Layout.CONCAT)
    assert sample.arrays.logprobs.tolist() == [0, 0, 0, -0.5, -0.5, 0, 0, -0.5, -0.5]
    assert [placed.span for placed in sample.placements] == [(3, 5), (7, 9)]


def test_one_reward_at_the_leaf_is_discounted_in_individual_only() -> None:
    nodes = [
        interaction("a", seq=0),
        interaction("b", parent="a", prefix=2, seq=1),
        interaction("c", parent="b", prefix=4, seq=2, reward=1.0),
    ]
    (sample,) = export(nodes, Layout.CONCAT, 0.9)
    assert sample.rewards.tolist() == [1.0]
    rewards = [single.rewards.item() for single in export(nodes, Layout.INDIVIDUAL, 0.9)]
    assert rewards == pytest.approx([0.81, 0.9, 1.0])


def test_an_unaligned_child_is_never_joined() -> None:
    nodes = [interaction("p", seq=0), interaction("c", parent="p", suffix=[7, 8, 9], seq=1)]
    first, second = export(nodes, Layout.CONCAT)
    assert [first.arrays.input_ids.tolist(), second.arrays.input_ids.tolist()] == [[1, 2], [7, 8, 9, 2]]
    assert certificate(RECORD, nodes)["unaligned"] == 1


def test_untrainable_turns_and_spans_are_context() -> None:
    nodes = pair()
    nodes[0].trainable = False
    nodes[1].spans = ((1, 2),)
    (sample,) = export(nodes, Layout.CONCAT)
    assert sample.arrays.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert sample.arrays.logprobs.tolist() == [0] * 8 + [-0.5]


def test_an_empty_session_has_no_samples_and_an_empty_certificate() -> None:
    assert export([], Layout.CONCAT) == []
    entry = certificate(RECORD, [])
    assert entry["complete"] and not entry["rewarded"]


def test_a_certificate_counts_missing_calls() -> None:
    failed = interaction("f", seq=1)
    failed.status = Status.FAILED
    entry = certificate(RECORD, [interaction("a", seq=0, reward=1.0), failed], begun_not_ended=2)
    assert (entry["complete"], entry["failed"], entry["begun_not_ended"], entry["rewarded"]) == (False, 1, 2, True)


def test_an_export_may_choose_another_credit_rule() -> None:
    nodes = [interaction("a", seq=0), interaction("b", seq=1, reward=1.0)]
    options = LayoutOptions(layout=Layout.INDIVIDUAL, discount=0.9, credit=Credit.LINEAR)
    assert [sample.rewards.item() for sample in export_session(RECORD, nodes, options)] == pytest.approx([0.9, 1.0])


@pytest.mark.parametrize(
    ("sampling", "grammar", "reason"),
    [
        (SamplingParams(), False, None),
        (SamplingParams(0.5, top_k=-1, seed=1, stop=("x",)), False, None),
        (SamplingParams(top_p=0.9), False, "truncated"),
        (SamplingParams(top_k=3), False, "truncated"),
        (SamplingParams(min_p=0.1), False, "truncated"),
        (SamplingParams(presence_penalty=0.1, top_p=0.9), False, "penalties"),
        (SamplingParams(frequency_penalty=-0.1), False, "penalties"),
        (SamplingParams(repetition_penalty=1.1), False, "penalties"),
        (SamplingParams(logit_bias=((5, 1.0),), presence_penalty=0.1), False, "bias"),
        (SamplingParams(logit_bias=((5, 1.0),), top_p=0.9), True, "grammar"),
        (SamplingParams(), True, "grammar"),
    ],
)
@pytest.mark.parametrize("layout", [Layout.INDIVIDUAL, Layout.CONCAT, Layout.TREE])
def test_recomputable_is_the_first_reason_why_logprobs_are_not_the_models(
    sampling: SamplingParams, grammar: bool, reason: str | None, layout: Layout
) -> None:
    node = interaction("p")
    node.sampling, node.grammar = sampling, grammar
    (sample,) = lay_out(RECORD, [node], LayoutOptions(layout=layout)).rows
    assert sample.labels()["recomputable"] == sample.labels()["turns"][0]["recomputable"] == reason


@pytest.mark.parametrize(
    ("sampling", "grammar", "logprobs_of", "reason"),
    [
        (SamplingParams(top_p=0.9), False, LogprobsOf.SAMPLED, "sampled"),
        (SamplingParams(logit_bias=((5, 1.0),), top_p=0.9), False, LogprobsOf.SAMPLED, "sampled"),
        (SamplingParams(top_p=0.9), True, LogprobsOf.SAMPLED, "grammar"),
        (SamplingParams(0.5), False, LogprobsOf.MODEL, "model"),
        (SamplingParams(logit_bias=((5, 1.0),), presence_penalty=0.1), False, LogprobsOf.MODEL, "model"),
        (SamplingParams(top_k=3), False, LogprobsOf.MODEL, "model"),
        (SamplingParams(0.5), True, LogprobsOf.MODEL, "grammar"),
    ],
)
def test_logprobs_that_are_not_by_the_rule_are_not_recomputable_from_ids_and_temperature(
    sampling: SamplingParams, grammar: bool, logprobs_of: LogprobsOf, reason: str
) -> None:
    node = interaction("p")
    node.sampling, node.grammar, node.logprobs_of = sampling, grammar, logprobs_of
    (sample,) = lay_out(RECORD, [node], LayoutOptions()).rows
    assert sample.labels()["turns"][0]["recomputable"] == reason


def test_a_sample_has_the_logprobs_of_the_trained_turn_that_is_furthest_from_the_rule() -> None:
    nodes = pair()
    nodes[0].logprobs_of, nodes[1].logprobs_of = LogprobsOf.MODEL, LogprobsOf.SAMPLED
    assert [sample.labels()["logprobs_of"] for sample in export(nodes, Layout.CONCAT)] == ["model"]
    nodes[0].trainable = False
    assert [sample.labels()["logprobs_of"] for sample in export(nodes, Layout.CONCAT)] == ["sampled"]
    nodes[1].trainable = False
    assert [sample.labels()["logprobs_of"] for sample in export(nodes, Layout.CONCAT)] == ["rule"]


def test_a_sample_has_the_first_reason_of_its_turns() -> None:
    nodes = pair()
    nodes[0].sampling, nodes[1].grammar = SamplingParams(top_p=0.5), True
    (sample,) = export(nodes, Layout.CONCAT)
    labels = sample.labels()
    assert [turn["recomputable"] for turn in labels["turns"]] == ["truncated", "grammar"]
    assert labels["recomputable"] == "grammar"
