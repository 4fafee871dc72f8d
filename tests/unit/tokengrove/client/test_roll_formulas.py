"""ROLL's formulas, written out here, on its names: discounted returns, group and state norms, segment returns.

The names are those that `roll/pipeline/agentic/utils.py` and `agentic_pipeline.py` of ROLL read from a DataProto.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.samples import chain, sample
from tokengrove.client import Sample
from tokengrove.client.adapters import roll
from tokengrove.client.adapters.roll import RollFields


def steps_of(session: str, rewards: Sequence[float]) -> list[Sample]:
    """The turns of one session of group g, as layout individual exports them."""
    return [
        sample(
            *(list(range(1, 2 + place)), [9, 8]),
            reward=reward,
            score=sum(rewards),
            session=session,
            group="g",
            interaction_id=f"{session}-{place}",
            interaction_ids=[f"{session}-{place}"],
        )
        for place, reward in enumerate(rewards)
    ]


def by(names: Iterable[Hashable]) -> dict[Hashable, list[int]]:
    """The rows of each name."""
    rows: dict[Hashable, list[int]] = defaultdict(list)
    for row, name in enumerate(names):
        rows[name].append(row)
    return rows


def discounted(fields: RollFields, gamma: float) -> np.ndarray[Any, Any]:
    """`step_rewards`: r_t + gamma r_(t+1) + ..., along `step` within each `traj_id`."""
    others = fields.non_tensor_batch
    scores, order = others["step_scores"].astype(np.float32), others["step"].astype(np.int64)
    found = np.zeros(len(scores), np.float32)
    for rows in by(others["traj_id"]).values():
        future = np.float32(0)
        for row in sorted(rows, key=lambda row: -order[row]):
            found[row] = future = scores[row] + np.float32(gamma) * future
    return found


def normed(values: np.ndarray[Any, Any], groups: Iterable[Hashable]) -> np.ndarray[Any, Any]:
    """(v - mean) / (std + 1e-6) within each group, std with Bessel's correction; 0 where nothing differs."""
    found = np.zeros(len(values), np.float32)
    for rows in by(groups).values():
        of_group = values[rows]
        if len(rows) > 1 and of_group.std(ddof=1) > 1e-6:
            found[rows] = (of_group - of_group.mean()) / (of_group.std(ddof=1) + 1e-6)
    return found


def test_rolls_discounted_returns_are_those_of_the_session() -> None:
    fields = roll.steps([*steps_of("s", [0.0, 0.0, 1.0]), *steps_of("t", [0.5, 0.0])])
    assert discounted(fields, 0.5).tolist() == [0.25, 0.5, 1.0, 0.5, 0.0]


def test_rolls_two_norms_of_gigpo_compare_episodes_and_equal_states() -> None:
    fields = roll.steps([*steps_of("s", [0.0, 1.0]), *steps_of("t", [0.0, 0.0])])
    others = fields.non_tensor_batch
    episodes = normed(others["episode_scores"].astype(np.float32), others["traj_group_id"])
    assert episodes == pytest.approx(np.array([1, 1, -1, -1]) * 0.5 / np.sqrt(1 / 3), rel=1e-5)
    states = zip(others["traj_group_id"], others["state_hash"], strict=True)
    # Both sessions saw state h0 in all of their steps: returns 1, 1, 0, 0.
    assert normed(discounted(fields, 1.0), states) == pytest.approx(episodes)


def test_rolls_segment_returns_discount_by_run_of_trained_tokens() -> None:
    agent = chain([([1, 2], [3, 4]), ([8], [5, 6])], rewards=[0.0, 1.0])
    batch = roll.trajectories([agent], sequence_length=8).batch
    mask, rewards = batch["response_mask"][0, 1:], batch["scores"][0, 1:]
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
    found, future = np.zeros(len(mask)), 0.0
    for start, end in reversed(list(zip(edges[::2], edges[1::2], strict=True))):
        found[start:end] = future = rewards[end - 1] + 0.5 * future
    assert found.tolist() == [0, 0.5, 0.5, 0, 1.0, 1.0, 0]
    assert batch["infer_logprobs"][0][mask].tolist() == agent.logprobs[agent.loss_mask > 0].tolist()


def test_rolls_response_level_rewards_and_episode_scores_count_a_session_by_its_trajectory() -> None:
    samples = [sample([1], [2], reward=value, session=name, group="g") for name, value in (("s", 1.0), ("t", 0.0))]
    fields = roll.trajectories(samples)
    level = normed(fields.batch["scores"].sum(axis=-1), fields.non_tensor_batch["traj_group_id"])
    assert level == pytest.approx([np.sqrt(0.5), -np.sqrt(0.5)], rel=1e-5)
    first = [rows[0] for rows in by(fields.non_tensor_batch["traj_id"]).values()]
    assert fields.non_tensor_batch["episode_scores"][first].tolist() == [1.0, 0.0]
