"""Which episodes TRL's worker compares, and when it gives up playing."""

from __future__ import annotations

from typing import Any

import pytest

from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.rollout.failure_log import FailureLog, TooManyFailedEpisodes
from tokengrove.trl.outcomes import NothingPlayed, Outcomes, compared


def result(failure: Any = None, reward: float | None = None) -> EpisodeResult:
    return EpisodeResult("t", 0, 0, "s", reward=reward, failure=failure, message=None if failure is None else "no luck")


@pytest.mark.parametrize(
    ("played", "counts"),
    [
        (result(), True),
        (result(reward=1.0), True),
        (result("timeout", 0.5), True),
        (result("timeout"), False),
        (result("agent", 0.5), False),
        (result("cancelled"), False),
    ],
)
def test_an_episode_is_compared_if_it_ended_or_was_rewarded_when_its_time_was_over(
    played: EpisodeResult, counts: bool
) -> None:
    assert compared(played) is counts


def test_one_result_among_groups_that_fail_lets_the_worker_go_on() -> None:
    outcomes = Outcomes(FailureLog(None, 2))
    for _ in range(3):
        for _ in range(2):
            outcomes.note([result("agent"), result("agent")])
        outcomes.note([result("agent"), result(reward=0.0)])


def test_three_groups_in_a_row_without_a_result_end_the_worker_with_the_reasons() -> None:
    outcomes = Outcomes(FailureLog(None, 2))
    for _ in range(2):
        outcomes.note([result("agent"), result("timeout")])
    with pytest.raises(TooManyFailedEpisodes, match=r"6 episodes in a row.* 3 x agent, .*no luck; 3 x t"):
        outcomes.note([result("agent"), result("timeout")])


def test_a_group_that_lost_the_server_ends_the_worker_at_once() -> None:
    with pytest.raises(NothingPlayed, match="the server is lost: no luck"):
        Outcomes(FailureLog(-1)).note([result("server"), result("server")])
