"""What the demo's trainer computes from samples before it changes a weight."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from tests.samples import chain, sample
from tokengrove.client import Sample
from tokengrove.demos.trainer import _checked, mean_score, temperatures, weighted_advantages
from tokengrove.errors import ProxyError


def two_turns(**more: Any) -> Sample:
    """Two turns: tokens 1 and 2, and token 4, of 5; the last token is trained by another sample."""
    found = chain([([1], [2, 3]), ([4], [5, 6])], rewards=[0.0, 1.0], **more)
    found.loss_mask[5] = 0
    return found


def test_an_advantage_counts_by_the_weight_of_its_sample() -> None:
    batch = [two_turns(advantages=[-2.0], weight=[0.25]), two_turns(advantages=[1.5], weight=[1.0])]
    found = weighted_advantages(batch)
    assert (found.tolist(), found.dtype) == ([-0.5, 1.5], np.float32)


def test_the_mean_reward_of_a_batch_counts_a_session_once_and_unrewarded_ones_not() -> None:
    assert mean_score({"forked in four": {"score": 1.0}, "b": {"score": 0.0}, "c": {"score": None}}) == 0.5
    assert np.isnan(mean_score({}))


def test_samples_without_advantages_are_refused_with_the_way_out() -> None:
    with pytest.raises(ProxyError, match="advantages='grpo'"):
        weighted_advantages([two_turns()])


def test_the_temperature_of_a_turn_applies_to_its_trained_tokens_and_that_of_greedy_turns_is_1() -> None:
    warm, greedy = two_turns(), sample([1], [2])
    for turn, heat in zip((*warm.turns, *greedy.turns), (0.7, 2.0, 0.0), strict=True):
        cast(dict[str, Any], turn).update(sampling={"temperature": heat})
    assert temperatures([warm, greedy]).tolist() == [pytest.approx([0, 0.7, 0.7, 0, 2.0, 0]), [0, 1.0, 0, 0, 0, 0]]


@pytest.mark.parametrize("ratios", [[], [1.0, float("nan")], [1.0, 0.998], [1.002], [float("inf")]])
def test_a_batch_is_refused_whose_ratios_are_not_1_or_are_none(ratios: list[float]) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with pytest.raises(ProxyError, match="ratio"):
        _checked(torch.tensor(ratios))
    assert _checked(torch.tensor([1.0, 0.9995])) == pytest.approx(0.0005, abs=1e-6)
