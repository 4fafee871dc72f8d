"""The numbers of a run: pass@k by counting all choices, means over what they say, and speed of this start only."""

from __future__ import annotations

from itertools import combinations

import pytest

from tokengrove.rollout.episodes import EpisodeResult
from tokengrove.runs.summary import Summary, mean_pass_at_k, pass_at_k, powers_up_to


def played(sample: int, reward: float | None = None, **more: object) -> EpisodeResult:
    return EpisodeResult("t", sample, 0, f"s{sample}", reward=reward, **more)  # type: ignore[arg-type]


def summary(episodes: int, group_size: int = 4, **more: object) -> Summary:
    return Summary("run", episodes, group_size, 1.0, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("samples", range(1, 7))
def test_pass_at_k_is_the_share_of_choices_of_k_samples_with_one_that_passed(samples: int) -> None:
    for passed in range(samples + 1):
        right = [True] * passed + [False] * (samples - passed)
        for k in range(1, samples + 1):
            choices = list(combinations(right, k))
            share = sum(any(choice) for choice in choices) / len(choices)
            assert pass_at_k(samples, passed, k) == pytest.approx(share)


def test_pass_at_k_refuses_more_samples_than_there_are() -> None:
    with pytest.raises(ValueError, match="pass@3 needs at least 3 samples"):
        pass_at_k(2, 1, 3)


def test_tasks_with_fewer_samples_than_k_are_left_out_of_its_mean() -> None:
    assert mean_pass_at_k([(4, 4), (1, 0)], 2) == 1.0
    assert mean_pass_at_k([(4, 4), (1, 0)], 1) == 0.5
    assert mean_pass_at_k([(1, 0)], 2) is None


@pytest.mark.parametrize(("most", "found"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_k_are_powers_of_two_and_the_size_of_the_group(most: int, found: list[int]) -> None:
    assert powers_up_to(most) == found


def test_a_failed_episode_and_one_without_reward_did_not_pass() -> None:
    counted = summary(4)
    for result in (played(0, 1.0), played(1, 0.5), played(2), played(3, failure="agent", message="no")):
        counted.add((0, "t"), result)
    assert counted.pass_at_k == {1: 0.25, 2: 0.5, 4: 1.0}
    assert (counted.rewarded, counted.mean_reward, counted.mean_reward_with_failures) == (2, 0.75, 0.5)
    assert (counted.done, counted.failed, counted.failures) == (3, 1, {"agent": 1})


def test_an_episode_that_failed_did_not_pass_though_it_was_rewarded_before() -> None:
    counted = summary(2, group_size=2)
    for result in (played(0, 1.0, failure="timeout", message="late"), played(1, 0.0)):
        counted.add((0, "t"), result)
    assert counted.pass_at_k == {1: 0.0, 2: 0.0}
    assert counted.mean_reward == 0.0


def test_without_any_reward_there_is_neither_a_mean_nor_pass_at_k() -> None:
    counted = summary(1)
    counted.add((0, "t"), played(0))
    found = counted.as_json()
    assert (found["mean_reward"], found["mean_reward_with_failures"], found["pass_at_k"]) == (None, None, {})


def test_speed_is_that_of_the_episodes_of_this_start() -> None:
    now = [100.0]
    counted = summary(2, clock=lambda: now[0])
    counted.add((0, "t"), played(0, output_tokens=1000), earlier=True)
    counted.add((0, "t"), played(1, output_tokens=30))
    now[0] = 110.0
    counted.end()
    now[0] = 200.0
    assert (counted.tokens_per_s, counted.seconds, counted.output_tokens, counted.earlier) == (3.0, 10.0, 1030, 1)


def test_named_scores_are_means_over_the_episodes_that_have_them() -> None:
    counted = summary(2)
    counted.add((0, "t"), played(0, scores={"style": 1.0, "length": 4.0}))
    counted.add((0, "t"), played(1, scores={"style": 0.0}))
    assert counted.scores == {"length": 4.0, "style": 0.5}


@pytest.mark.parametrize(("allowed", "succeeded"), [(0, False), (1, True)])
def test_a_run_succeeds_with_no_more_failures_than_are_allowed(allowed: int, succeeded: bool) -> None:
    counted = summary(2, allowed=allowed)
    counted.add((0, "t"), played(0, 1.0))
    assert not counted.succeeded  # one is still to be played
    counted.add((0, "t"), played(1, failure="timeout"))
    assert counted.succeeded is succeeded
    counted.stopped = "interrupted"
    assert not counted.succeeded
