"""Following a server's events: it may stop and come back, and says so once."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import pytest

from tokengrove.client import ServerEvent, ServerUnreachable
from tokengrove.commands.event_stream import AGAIN_S, Connected, Lost, follow
from tokengrove.errors import ProxyError, StoreUnavailable, TooManyRequests, Unauthorized

ONE, TWO = ServerEvent("statistics", {"at": 1}), ServerEvent("statistics", {"at": 2})


class Server:
    """A client of a server that answers each call of `events` with the next of these."""

    def __init__(self, *answers: list[ServerEvent | Exception]) -> None:
        self._answers = iter(answers)
        self.asked: list[Any] = []

    def events(self, kinds: Any) -> Iterator[ServerEvent]:
        self.asked.append(kinds)
        for event in next(self._answers):
            if isinstance(event, Exception):
                raise event
            yield event


def test_a_server_that_comes_back_is_heard_again_and_its_absence_told_once() -> None:
    gone, waits = ServerUnreachable("no answer"), list[float]()
    server: Any = Server([ONE], [gone], [gone], [TWO, gone], [ONE])
    told = list(islice(follow(server, ["statistics"], wait=waits.append), 8))
    closed = Lost("the server closed the connection")
    assert told == [Connected(), ONE, closed, Connected(), TWO, Lost("no answer"), Connected(), ONE]
    assert waits == [AGAIN_S] * 4
    assert server.asked == [["statistics"]] * 5


@pytest.mark.parametrize("error", [ServerUnreachable, StoreUnavailable, TooManyRequests])
def test_a_server_that_cannot_answer_for_now_is_asked_again(error: type[ProxyError]) -> None:
    server: Any = Server([ONE], [error("not now")], [TWO])
    told = list(islice(follow(server, wait=lambda _: None), 5))
    assert [each for each in told if isinstance(each, ServerEvent)] == [ONE, TWO]


def test_a_server_that_never_answered_is_an_error() -> None:
    server: Any = Server([ServerUnreachable("no answer")])
    with pytest.raises(ServerUnreachable):
        next(follow(server))


def test_a_key_that_is_refused_after_a_restart_is_an_error() -> None:
    server: Any = Server([ONE], [Unauthorized("the key is wrong")])
    with pytest.raises(Unauthorized):
        list(follow(server, wait=lambda _: None))
