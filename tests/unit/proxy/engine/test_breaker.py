"""The circuit breaker of a server, with a clock that the test moves."""

from __future__ import annotations

import random

import pytest

from proxy.engine.servers.breaker import Breaker


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def breaker_of(clock: Clock, chance: float = 0.0) -> Breaker:
    return Breaker(clock, lambda: chance)


def opened(clock: Clock, breaker: Breaker) -> None:
    """Blame the server until the breaker opens."""
    for _ in range(3):
        clock.now += 0.001
        breaker.blame(clock.now, alone=False)
    assert breaker.open


def test_three_failures_open_it_and_the_last_server_keeps_it_closed(clock: Clock) -> None:
    breaker = breaker_of(clock)
    assert [breaker.blame(clock.now, alone=False) for _ in range(4)] == [False, False, True, False]
    last = breaker_of(clock)
    assert not any(last.blame(clock.now, alone=True) for _ in range(50)) and not last.open
    assert last.blame(clock.now, alone=False)  # another server has come


@pytest.mark.parametrize(("part", "opens"), [(0.05, False), (0.5, True)])
def test_a_server_that_fails_now_and_then_stays_and_one_that_fails_often_goes(
    clock: Clock, part: float, opens: bool
) -> None:
    rng, breaker = random.Random(1), breaker_of(clock)
    for _ in range(300):
        if rng.random() < part:
            breaker.blame(clock.now, alone=False)
        else:
            breaker.credit()
    assert breaker.open is opens


def test_failures_from_before_a_passed_probe_are_void(clock: Clock) -> None:
    breaker, failed_at = breaker_of(clock), clock.now
    clock.now += 1
    breaker.close()
    assert not any(breaker.blame(failed_at, alone=False) for _ in range(10))
    opened(clock, breaker)


@pytest.mark.parametrize("chance", [0.0, 0.999])
def test_the_wait_for_a_probe_doubles_up_to_a_bound_and_varies_by_a_quarter(clock: Clock, chance: float) -> None:
    breaker, waits = breaker_of(clock, chance), []
    assert breaker.due
    opened(clock, breaker)
    for _ in range(40):
        began = clock.now
        while not breaker.due:
            clock.now += 0.01
        waits.append(clock.now - began)
        breaker.postpone()
    least = 1.0 - 0.25 * chance
    assert waits[:3] == pytest.approx([least, 2 * least, 4 * least], abs=0.02)
    assert all(wait == pytest.approx(30.0 * least, abs=0.02) for wait in waits[5:])


def test_after_a_passed_probe_one_failure_opens_it_again_for_longer_until_requests_have_succeeded(clock: Clock) -> None:
    breaker = breaker_of(clock)
    opened(clock, breaker)
    clock.now += 1.0
    assert breaker.due
    breaker.close()
    clock.now += 0.1
    assert breaker.blame(clock.now, alone=False)
    clock.now += 1.5
    assert not breaker.due
    clock.now += 0.5
    assert breaker.due
    breaker.close()
    for _ in range(8):
        breaker.credit()
    clock.now += 0.1
    assert not breaker.blame(clock.now, alone=False)
    opened(clock, breaker)
    clock.now += 1.0
    assert breaker.due
