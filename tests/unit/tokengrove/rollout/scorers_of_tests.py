"""Scorers that tests name by their paths."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from tokengrove.client import AsyncClient
from tokengrove.rollout.scorers import Trajectory, Turn, trajectory_scorer, turn_scorer


@turn_scorer(name="length")
async def by_length(turn: Turn, messages: Sequence[Any], interaction_id: str) -> float:
    assert messages == turn.messages and interaction_id == turn.interaction_id
    return float(len(turn.text))


@turn_scorer
def first_only(turn: Turn, index: int) -> float | None:
    return 1.0 if index == 0 else None


@trajectory_scorer(name="judge/grade")
async def judged(trajectory: Trajectory, task: Mapping[str, Any], reward: float) -> float:
    return reward + len(trajectory.turns) + float(task["answer"] == trajectory.output)


@trajectory_scorer
async def by_id(interaction_ids: list[str]) -> dict[str, float]:
    return dict.fromkeys(interaction_ids, 0.25)


@trajectory_scorer
async def asks_the_policy(trajectory: Trajectory, client: AsyncClient) -> float:
    answer = await client.generate([1, 2, 3], sampling_params={"max_tokens": 2})
    return float(len(answer.output_ids))


def plain(trajectory: Trajectory, answer: str) -> float:
    return float(answer == "oak")


def marked(output: str) -> float:
    return float(len(output))


marked.per = "turn"  # type: ignore[attr-defined]


def unmarked(output: str) -> float:
    return 1.0


@trajectory_scorer
def breaks(trajectory: Trajectory) -> float:
    raise LookupError("the judge is away")


@turn_scorer
def interrupts(turn: Turn, session_id: str) -> float:
    """Score the session `a`; in the next one, act like Ctrl-C."""
    if session_id != "a":
        signal.raise_signal(signal.SIGINT)
    return 1.0
