"""How often TRL's worker plays an episode, and with which seeds and sessions."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server
from tokengrove.rollout.scheduler import play_with_retries
from tokengrove.trl.groups import RETRIED, Groups


class Failing:
    """An executor whose first attempts fail with these kinds, and the next ones not."""

    def __init__(self, *failures: Any) -> None:
        self.failures, self.plans = failures, list[EpisodePlan]()

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        self.plans.append(plan)
        failure = self.failures[plan.attempt] if plan.attempt < len(self.failures) else None
        return EpisodeResult("t", plan.sample, plan.attempt, plan.session_id, failure=failure)

    async def close(self) -> None: ...
    async def __aenter__(self) -> Failing:
        return self

    async def __aexit__(self, *_: object) -> None: ...


def groups(size: int = 2) -> Groups:
    server, agent = Server("http://s"), AgentSpec("path", "a:b")
    return Groups([{}], size, server=server, agent=agent, options={}, seed=5)


@pytest.mark.parametrize(
    ("failures", "retries", "played", "failure"),
    [
        (("agent", "server", "worker"), 2, 3, "worker"),
        (("agent",), 2, 2, None),
        (("agent",), 0, 1, "agent"),
        (("cancelled",), 2, 1, "cancelled"),
    ],
)
async def test_an_episode_is_played_as_often_as_its_retries_allow_each_time_in_a_session_of_its_own(
    failures: tuple[str, ...], retries: int, played: int, failure: str | None
) -> None:
    executor = Failing(*failures)
    plan_of = partial(groups().planner(0, {}), 0)
    result = await play_with_retries(executor, plan_of, retries, RETRIED)
    assert (len(executor.plans), result.failure) == (played, failure)
    assert len({each.session_id for each in executor.plans}) == played
    assert {each.seed for each in executor.plans} == {plan_of(0, False).seed}
    last = [each.attempt == retries for each in executor.plans]
    assert [each.discard for each in executor.plans] == [frozenset() if each else RETRIED for each in last]


def test_the_episodes_of_all_groups_have_seeds_of_their_own() -> None:
    chosen = groups(size=3)
    plans = [chosen.planner(number, {})(sample, 0, True) for number in range(3) for sample in range(3)]
    assert len({plan.seed for plan in plans}) == len({plan.session_id for plan in plans}) == 9
    assert [plan.sample for plan in plans] == [0, 1, 2] * 3
    other = groups(size=3)
    again = [other.planner(number, {})(sample, 0, True).seed for number in range(3) for sample in range(3)]
    assert again == [plan.seed for plan in plans]
