"""`max_tokens` is the minimum of all limits; a limit that is reached is refused by its name."""

from __future__ import annotations

import time
from typing import Any

import pytest

from proxy.sessions.live_session import LiveSession
from proxy.settings import Settings
from proxy.trajectory.cache import InteractionCache
from proxy.turns.budgets import apply_budgets, context_of
from proxy.types import SamplingParams, SessionRecord
from tests.interactions import interaction
from tokengrove.errors import ContextLengthExceeded, LimitReached


def session(sampled: int = 0, turns: int = 0, **limits: Any) -> LiveSession:
    nodes = [interaction(str(number), seq=number) for number in range(turns)]
    return LiveSession(
        SessionRecord("s", limits=limits, created_at=time.time()), InteractionCache(nodes), sampled, turns_taken=turns
    )


def budget(
    held: LiveSession, *, asked: int | None = None, choices: int = 1, prompt: int = 10, **settings: Any
) -> int | None:
    sampling = SamplingParams(max_tokens=asked)
    allowed = Settings(**settings)
    return apply_budgets(sampling, choices, held, prompt, allowed, context_of(held, allowed, 100)).max_tokens


def test_the_smallest_limit_sets_max_tokens() -> None:
    assert budget(session()) == 90
    assert budget(session(), asked=7) == 7
    assert budget(session(), asked=700) == 90
    assert budget(session(), asked=50, max_tokens_per_turn=20) == 20
    assert budget(session(max_tokens_per_turn=5), asked=50) == 5
    assert budget(session(max_context_tokens=15)) == 5
    assert budget(session(), max_context_tokens=12) == 2
    assert budget(session(sampled=30, max_total_tokens=40)) == 10


def test_choices_share_what_the_session_may_still_sample() -> None:
    assert budget(session(sampled=30, max_total_tokens=40), choices=4) == 2
    assert budget(session(sampled=30, max_total_tokens=40), choices=10) == 1
    assert budget(session(sampled=30, max_total_tokens=400), choices=4, asked=50) == 50
    with pytest.raises(LimitReached) as caught:
        budget(session(sampled=30, max_total_tokens=40), choices=11)
    assert caught.value.param == "limits.max_total_tokens"


@pytest.mark.parametrize(
    ("held", "limit"),
    [
        (session(turns=3, max_turns=3), "limits.max_turns"),
        (session(sampled=40, max_total_tokens=40), "limits.max_total_tokens"),
        (session(deadline_s=-1.0), "limits.deadline_s"),
    ],
)
def test_a_limit_that_is_reached_is_refused_by_its_name(held: LiveSession, limit: str) -> None:
    with pytest.raises(LimitReached) as caught:
        budget(held)
    assert caught.value.param == limit


def test_a_prompt_that_fills_the_context_is_an_error_with_both_lengths() -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        budget(session(), prompt=100)
    assert (caught.value.prompt_tokens, caught.value.context_tokens) == (100, 100)


def test_a_prompt_that_fills_the_context_leaves_no_tokens_where_the_session_asks_for_that() -> None:
    assert budget(session(on_context_overflow="length"), prompt=100) == 0
