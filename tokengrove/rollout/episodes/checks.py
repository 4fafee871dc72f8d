"""Checks of a run's functions before its first episode."""

from __future__ import annotations

from collections.abc import Sequence

from tokengrove.rollout.episodes.reward_function import RewardFunction
from tokengrove.rollout.episodes.task import Task
from tokengrove.rollout.scorers import load_scorer
from tokengrove.rollout.scorers.scoring import check_names


def check_functions(reward: str | None, scorers: Sequence[str], task: Task) -> None:
    """Import the reward function and the scorers, and check that an episode of this task fills their parameters.

    Raises InvalidRequest for a path that is not such a function, for a parameter that cannot be filled, and for two
    scorers with the same name. An import may raise any exception.
    """
    if reward is not None:
        RewardFunction.load(reward).check(task)
    made = [load_scorer(path) for path in scorers]
    check_names(made)
    for scorer in made:
        scorer.check(task.data)
