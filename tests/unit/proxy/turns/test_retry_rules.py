"""The retry rules as a function of the earlier attempts, without a server."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from proxy.sessions.attempts import Attempt, Stage
from proxy.turns.retries import Attach, NewSample, Replay, decide
from proxy.types import Api, Message, Role, TurnRequest
from tests.interactions import interaction

REQUEST = TurnRequest(Api.CHAT, "m", (Message(Role.USER, "hi"),))
RETRY = replace(REQUEST, retry=True)


def attempt(stage: Stage = Stage.COMPLETE, choices: int = 1, **more: Any) -> Attempt:
    return Attempt("hash", stage=stage, interactions=[interaction(str(n), seq=n) for n in range(choices)], **more)


def test_an_attempt_that_lacks_a_choice_is_not_replayed() -> None:
    """A crash between the commits of two choices leaves one."""
    both = replace(RETRY, n=2)
    assert decide([attempt(choices=1)], both) == NewSample([])
    whole = attempt(choices=2)
    assert decide([whole], both) == Replay(whole)


@pytest.mark.parametrize("request_", [REQUEST, RETRY])
def test_of_several_unread_attempts_the_newest_counts(request_: TurnRequest) -> None:
    old, new = attempt(), attempt()
    assert decide([old, new], request_) == Replay(new)
    running = attempt(Stage.RUNNING)
    assert decide([old, running], request_) == Attach(running)


def test_an_unmarked_repetition_is_a_new_sample_once_a_reply_is_read_or_written() -> None:
    for more in ({"readers": 1}, {"written": True}, {"unsettled": True}):
        assert decide([attempt(**more)], REQUEST) == NewSample([])
        assert isinstance(decide([attempt(**more)], RETRY), Replay)


def test_all_failed_attempts_that_nothing_superseded_are_superseded_together() -> None:
    failed, ending, done = attempt(Stage.FAILED), attempt(Stage.ENDING), attempt(Stage.FAILED, superseded=True)
    assert decide([done, failed, ending], RETRY) == NewSample([failed, ending])


def test_an_idempotency_key_decides_before_the_mark_of_a_retry() -> None:
    mine, other = attempt(idempotency_key="a", written=True), attempt(idempotency_key="b", written=True)
    assert decide([mine, other], replace(RETRY, idempotency_key="a")) == Replay(mine)
    assert decide([mine, other], replace(RETRY, idempotency_key="c")) == NewSample([])
