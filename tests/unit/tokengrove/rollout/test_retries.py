from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest, ProxyError, StoreUnavailable, TooManyRequests
from tokengrove.rollout.retries import retried, retried_here


class Failing:
    """A call that raises `errors` in order, and then returns how often it was called."""

    def __init__(self, *errors: ProxyError) -> None:
        self.errors, self.calls = list(errors), 0

    async def __call__(self) -> int:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)
        return self.calls


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses, which do not wait."""
    pauses: list[float] = []

    async def sleep(seconds: float, *_: Any) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    return pauses


async def test_errors_that_pass_are_repeated_with_the_pauses_that_the_server_asks_for(pauses: list[float]) -> None:
    call = Failing(StoreUnavailable("down"), TooManyRequests("full", retry_after_s=3.0), StoreUnavailable("down"))
    assert await retried(call, 60.0) == 4
    assert pauses == [0.25, 3.0, 1.0]


async def test_errors_that_stay_are_raised_at_once(pauses: list[float]) -> None:
    with pytest.raises(InvalidRequest):
        await retried(Failing(InvalidRequest("no")), 60.0)
    assert pauses == []


async def test_the_last_error_is_raised_once_the_time_is_over(pauses: list[float]) -> None:
    call = Failing(*(TooManyRequests("full", retry_after_s=pause) for pause in (1.0, 100.0)))
    with pytest.raises(TooManyRequests):
        await retried(call, 60.0)
    assert (call.calls, pauses) == (2, [1.0])


def test_calls_that_block_are_repeated_by_the_same_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def raising(*errors: ProxyError) -> Any:
        rest = list(errors)

        def call() -> str:
            if rest:
                raise rest.pop(0)
            return "answer"

        return call

    errors = (StoreUnavailable("down"), TooManyRequests("full", retry_after_s=3.0), StoreUnavailable("down"))
    assert retried_here(raising(*errors), 60.0) == "answer"
    assert pauses == [0.25, 3.0, 1.0]
    with pytest.raises(InvalidRequest):
        retried_here(raising(InvalidRequest("no")), 60.0)
    with pytest.raises(TooManyRequests):
        retried_here(raising(TooManyRequests("full", retry_after_s=100.0)), 60.0)
    assert len(pauses) == 3
