"""What truncation cuts off is cut before it is decided which sample trains a token."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.trajectory.layout_options import Freshness, LayoutOptions
from proxy.trajectory.layouts import lay_out
from proxy.trajectory.session_samples import SessionSamples
from proxy.types import Interaction, SessionRecord
from tests import golden
from tests.interactions import forests, interaction
from tokengrove.options.export import Keep, Layout, Padding, TooLong

RECORD = SessionRecord("s", discount=1.0)


def family() -> list[Interaction]:
    """The root and the children of the golden cases."""
    return [
        interaction("root", suffix=[1, 2], output=[3, 4], seq=0),
        interaction("a", parent="root", prefix=4, suffix=[5], output=[6, 7], version=1, seq=1),
        interaction("b", parent="root", prefix=4, suffix=[8], output=[9], version=1, seq=2),
    ]


def cut(nodes: list[Interaction], keep: Keep, prompt: int = 2, response: int = 3, **limits: int) -> SessionSamples:
    padding = Padding(prompt, response, on_too_long=TooLong.TRUNCATE, keep=keep)
    return lay_out(RECORD, nodes, LayoutOptions(layout=Layout.PADDED, padding=padding, freshness=Freshness(**limits)))


def columns(laid: SessionSamples, name: str) -> list[list[int]]:
    return [row.columns()[name].tolist() for row in laid.rows]


@pytest.mark.parametrize("case", golden.load("cuts"))
def test_truncated_samples_are_the_golden_ones(case: dict[str, Any]) -> None:
    laid = cut(family(), Keep(case["keep"]))
    assert columns(laid, "responses") == case["responses"]
    assert columns(laid, "response_mask") == case["masks"]
    labels = [row.labels() for row in laid.rows]
    assert [[turn["span"] for turn in each["turns"]] for each in labels] == case["spans"]
    assert [[turn["recomputable"] for turn in each["turns"]] for each in labels] == case["recomputable"]
    assert laid.masked_tokens == case["masked"]
    assert laid.ledger.untrained() == case["untrained"]
    assert (laid.ledger.sampled(), laid.ledger.trained()) == (5, 5 - sum(case["untrained"].values()))


@pytest.mark.parametrize("case", golden.load("cuts"))
def test_the_oldest_version_is_judged_after_the_cut(case: dict[str, Any]) -> None:
    laid, expected = cut(family(), Keep(case["keep"]), min_version=1), case["from_version_1"]
    assert (columns(laid, "responses"), columns(laid, "response_mask")) == (expected["responses"], expected["masks"])
    assert laid.ledger.untrained() == expected["untrained"]


def test_rewards_of_tokens_stand_at_the_tokens_that_are_kept() -> None:
    nodes = family()
    nodes[0].token_rewards = nodes[0].logprobs.__class__("f", [0.25, 0.5])
    first, second = cut(nodes, Keep.TAIL).rows
    assert "token_rewards" not in first.columns()
    assert second.columns()["token_rewards"].tolist() == [0, 0, 0.5, 0, 0]


def test_an_answer_whose_prompt_was_cut_cannot_be_recomputed() -> None:
    reasons = [
        [turn["recomputable"] for turn in row.labels()["turns"]]
        for prompt in (1, 2)
        for row in cut(family()[:2], Keep.HEAD, prompt, response=5).rows
    ]
    assert reasons == [["cut", "cut"], [None, None]]


def test_tokens_that_one_sample_keeps_are_not_masked_by_the_cut_of_a_later_one() -> None:
    nodes = family()
    nodes[2] = interaction("b", parent="root", prefix=4, suffix=[8], output=[9, 10, 11, 12], seq=2)
    laid = cut(nodes, Keep.TAIL, response=5)
    assert columns(laid, "responses") == [[3, 4, 5, 6, 7], [8, 9, 10, 11, 12]]
    assert (laid.masked_tokens, laid.ledger.untrained()) == (0, {})


@given(forests(), st.integers(1, 6), st.integers(1, 6), st.sampled_from(Keep))
def test_a_trainable_token_is_trained_once_if_any_sample_keeps_it(
    nodes: list[Interaction], prompt: int, response: int, keep: Keep
) -> None:
    """Tokens of `forests` are unique within a session, except that forests have fewer than ten of each node."""
    laid = cut(nodes, keep, prompt, response)
    trained, kept = [], set()
    for row in laid.rows:
        found = row.columns()
        trained += found["input_ids"][found["loss_mask"] == 1].tolist()
        kept |= set(found["responses"][: found["response_lengths"].item()].tolist())
        for turn, node in zip(row.labels()["turns"], row.sample.placements, strict=True):  # type: ignore[attr-defined]
            if turn["span"] is not None:
                stands = found["input_ids"][slice(*turn["span"])].tolist()
                assert node.interaction.output_ids.tolist()[slice(*node.kept)] == stands
    allowed = {
        token for node in nodes for token in (node.output_ids[:1] if node.spans else node.output_ids) if node.trainable
    }
    assert sorted(trained) == sorted(allowed & kept)
    assert laid.ledger.trained() == len(trained)
    assert laid.ledger.trained() + sum(laid.ledger.untrained().values()) == sum(len(n.output_ids) for n in nodes)
