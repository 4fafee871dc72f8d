"""Rewards compared within groups. A group is whole: it is counted over all sessions that match, not over a page.

Sessions of one `group_id` are one group; a session without one is alone, and its advantage is 0. Steps are compared
with the steps of their group that have the same `state_hash`, by their returns; those without a hash have 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from proxy.trajectory.main_reward import MainReward
from proxy.trajectory.returns import Rewarded, compute_returns
from proxy.types import Credit, Status

# As trainers that compute GRPO themselves have it.
_EPSILON = 1e-6


class Baseline(StrEnum):
    """What a value is held against.

    grpo: (r - mean) / (std + 1e-6), std with Bessel's correction (divided by n - 1), of A_i = (r_i - mean(r)) / std(r),
    Shao et al. 2024, "DeepSeekMath", section 4.1.2. leave_one_out: r - mean of the others, Ahmadian et al. 2024, "Back
    to Basics", equation 8. Steps: Feng et al. 2025, "Group-in-Group Policy Optimization", section 3.2.
    """

    GRPO = "grpo"
    LEAVE_ONE_OUT = "leave_one_out"


class Step(Rewarded, Protocol):
    """What of an interaction counts in a group."""

    @property
    def rewards(self) -> Mapping[str, float]: ...
    @property
    def state_hash(self) -> str | None: ...


@dataclass(slots=True)
class Spread:
    """Count, mean and sum of squared distances of values, one pass (Welford 1962)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        distance = value - self.mean
        self.mean += distance / self.count
        self.squares += distance * (value - self.mean)

    def advantage(self, value: float, baseline: Baseline) -> float:
        """Of one of the values that were added; 0 where there is no other."""
        if self.count < 2:
            return 0.0
        if baseline is Baseline.LEAVE_ONE_OUT:
            return value - (self.mean * self.count - value) / (self.count - 1)
        return (value - self.mean) / (math.sqrt(self.squares / (self.count - 1)) + _EPSILON)


Group = str | tuple[str]
"""A group_id, or the session_id in a tuple where there is none."""


def group_of(session_id: str, group_id: str | None) -> Group:
    return (session_id,) if group_id is None else group_id


@dataclass(frozen=True, slots=True)
class Groups:
    """The values of all groups: scores of sessions, and returns of steps by state."""

    scores: dict[Group, Spread] = field(default_factory=dict)
    states: dict[tuple[Group, str], Spread] = field(default_factory=dict)

    def add(self, group: Group, steps: Sequence[Step], reward: MainReward, discount: float, credit: Credit) -> None:
        """Count one session; `steps` in order of `seq`. One without a complete step is in no group."""
        complete = [step for step in steps if step.status is Status.COMPLETE]
        if not complete:
            return
        main = {step.id: reward.of(step.reward, step.rewards) for step in complete}
        self.scores.setdefault(group, Spread()).add(score(main.values()))
        returns = compute_returns(complete, discount, credit, main)
        for step in complete:
            if step.state_hash is not None:
                self.states.setdefault((group, step.state_hash), Spread()).add(returns[step.id])

    def advantage(self, group: Group, value: float, baseline: Baseline) -> float:
        """Of a session whose score is `value`."""
        spread = self.scores.get(group)
        return 0.0 if spread is None else spread.advantage(value, baseline)

    def step_advantage(self, group: Group, state_hash: str | None, value: float, baseline: Baseline) -> float:
        """Of a step whose return is `value`."""
        spread = None if state_hash is None else self.states.get((group, state_hash))
        return 0.0 if spread is None else spread.advantage(value, baseline)


def score(rewards: Iterable[float | None]) -> float:
    """A session's score: the sum of the main rewards of its complete interactions, each once; a missing one is 0."""
    return math.fsum(reward or 0.0 for reward in rewards)
