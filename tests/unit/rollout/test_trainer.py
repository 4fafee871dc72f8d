"""What the demo's trainer computes from samples before it changes a weight."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from proxy.client import Sample
from proxy.client.values import sample_of
from proxy.errors import ProxyError
from proxy.rollout.trainer import _checked, advantages, per_token, temperatures


def sample(group: str, *turns: tuple[float, float, list[int]], length: int = 6) -> Sample:
    """A sample with turns given as (return, temperature, span)."""
    listed: list[dict[str, Any]] = [
        {"return": value, "sampling": {"temperature": heat}, "span": span} for value, heat, span in turns
    ]
    columns = ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids", "attention_mask")
    labels = {"session_id": "s", "interaction_id": "i", "interaction_ids": ["i"], "group_id": group, "turns": listed}
    return sample_of({**labels, **{name: [0] * length for name in columns}, "rewards": [0.0], "raw_rewards": [0.0]})


def test_an_advantage_is_a_turns_return_against_those_at_its_place_in_its_group() -> None:
    batch = [
        sample("a", (1.0, 1.0, [1, 2]), (0.5, 1.0, [3, 4])),
        sample("a", (0.0, 1.0, [1, 2])),
        sample("a", (0.5, 1.0, [1, 2]), (0.0, 1.0, [3, 4])),
        sample("b", (7.0, 1.0, [1, 2])),
    ]
    third = np.sqrt(1 / 6)  # the standard deviation of 1, 0 and 0.5
    expected = [[0.5 / third, 1.0], [-0.5 / third], [0.0, -1.0], [0.0]]
    for found, wanted in zip(advantages(batch), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)


def test_equal_returns_teach_nothing() -> None:
    batch = [sample("a", (0.5, 1.0, [1, 2])) for _ in range(4)]
    assert advantages(batch) == [[0.0]] * 4


def test_the_value_of_a_turn_applies_to_its_sampled_tokens() -> None:
    batch = [sample("a", (2.0, 1.0, [1, 3]), (3.0, 1.0, [4, 5])), sample("a", (4.0, 1.0, [0, 1]), length=2)]
    laid = per_token(batch, [[2.0, 3.0], [4.0]])
    assert laid.tolist() == [[1, 2, 2, 1, 3, 1], [4, 1, 1, 1, 1, 1]]
    assert laid.dtype == np.float32


def test_temperature_is_the_turns_own_and_that_of_greedy_turns_is_1() -> None:
    batch = [sample("a", (0.0, 0.7, [0, 1]), (0.0, 0.0, [2, 3]))]
    assert temperatures(batch) == [[0.7, 1.0]]


@pytest.mark.parametrize("ratios", [[], [1.0, float("nan")], [1.0, 0.998], [1.002], [float("inf")]])
def test_a_batch_is_refused_whose_ratios_are_not_1_or_are_none(ratios: list[float]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ProxyError, match="ratio"):
        _checked(torch.tensor(ratios))
    assert _checked(torch.tensor([1.0, 0.9995])) == pytest.approx(0.0005, abs=1e-6)
