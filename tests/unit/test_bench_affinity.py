"""What the simulated servers of the bench of placement hold, lose and take time for."""

from __future__ import annotations

import random
import statistics

import pytest

from tests.bench.affinity import POLICIES, Workload, measure
from tests.bench.affinity_servers import Clock, PrefixCache, Request, SimulatedServer, Speed
from tests.bench.affinity_sessions import MOST_TURNS, drawn, recorded

SPEED = Speed(capacity=1000, running=2, prefill_per_s=100.0, step_s=1.0, step_s_per_request=0.0)


def request(name: str, prompt: int, output: int = 10, group: str = "g", shared: int = 100) -> Request:
    return Request(name, name, group, shared, prompt, output, 0.0)


def test_a_cache_holds_what_ran_and_drops_the_least_recently_used_from_its_end() -> None:
    cache = PrefixCache(1000)
    for name in "ab":
        assert cache.take(request(name, 390))
        cache.give_back(request(name, 390))
    assert cache.held(request("a", 500)) == 400 and cache.held(request("c", 500)) == 100
    assert cache.take(request("c", 490))  # 700 of 1,000 are used, and 400 are needed
    assert cache.held(request("a", 500)) == 300 and cache.held(request("b", 500)) == 400


def test_what_runs_and_the_prompt_of_its_group_are_not_dropped() -> None:
    cache = PrefixCache(1000)
    assert cache.take(request("a", 790))
    assert not cache.take(request("b", 490, group="h"))
    assert cache.held(request("a", 790)) == 790
    cache.give_back(request("a", 790))
    assert cache.take(request("b", 890, group="h"))
    assert cache.held(request("a", 790)) == 100  # 700 go from its end, and the group's prompt stays


def test_a_server_computes_one_prompt_at_a_time_and_then_samples_together() -> None:
    clock, ended = Clock(), dict[str, float]()
    server = SimulatedServer(clock, SPEED, lambda done: ended.update({done.session: clock.now}))
    for name in "abc":
        server.submit(request(name, 200))
    clock.run(lambda: True)
    # a: 2 s for its prompt. b: 1 s more, as it shares half. Both take 10 steps. c gets the place of a, and b waits a
    # second for its last token.
    assert ended == {"a": 13.0, "b": 14.0, "c": 24.0}
    assert (server.prompt_tokens, server.cached_tokens) == (600, 200)


def test_a_server_that_dies_returns_its_requests_with_their_tokens_and_forgets_its_cache() -> None:
    clock = Clock()
    server = SimulatedServer(clock, SPEED, lambda done: None)
    server.submit(request("a", 100))
    lost: list[Request] = []
    clock.call_in(5.0, lambda: lost.extend(server.die()))
    clock.run(lambda: True)
    assert [(each.session, each.done) for each in lost] == [("a", 4)]
    assert server.cache.held(request("a", 100)) == 0


@pytest.mark.wide
def test_the_drawn_numbers_of_turns_have_the_stated_mean_and_maximum() -> None:
    for mean in (32, 80):
        turns = [len(session.steps) for session in drawn(random.Random(3), 500, mean)]
        assert abs(statistics.fmean(turns) - mean) < 0.06 * mean and max(turns) <= MOST_TURNS


def test_a_seed_gives_the_same_figures_for_every_policy() -> None:
    workload = Workload("few", lambda rng: recorded(rng, 6), 16, outages=True)
    for policy in POLICIES:
        first = measure(workload, 7, policy, Speed())
        assert first == measure(workload, 7, policy, Speed())
        assert 0 < first.hit_rate < 1
