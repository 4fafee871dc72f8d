"""Wrong keys are answered late, right ones never, and nothing that waits holds anything up."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.api.addresses import Addresses
from proxy.api.http import error_response
from proxy.api.long_polls import LongPolls
from proxy.api.wrong_keys import LONGEST_S, MOST_OF_ONE, MOST_SENDERS, MOST_WAITING, WRONG_KEYS, WrongKeys
from proxy.sessions.keys import WrongKey
from proxy.settings import Settings
from tests.support import Server, says, serving, user
from tokengrove.errors import Forbidden, ProxyError, SessionClosed, TooManyRequests, Unauthorized

KEY, OLD = "the-key-of-the-administrator", "an-older-key-of-the-administrator"
TURN = {"model": "m", "messages": [user("hi")]}


class Held(LongPolls):
    """Waits that last until `go`. `begun`: one item for each."""

    def __init__(self) -> None:
        super().__init__()
        self.go = asyncio.Event()
        self.begun: asyncio.Queue[None] = asyncio.Queue()

    async def wait(self, something: Coroutine[Any, Any, Any]) -> Any:
        something.close()
        self.begun.put_nowait(None)
        return await super().wait(self.go.wait())


def scope_of(client: str = "10.0.0.1", key: str | None = "wrong", path: str = "/rl/sessions", **more: str) -> Any:
    headers = [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]
    headers += [(b"authorization", f"Bearer {key}".encode())] if key else []
    return {"type": "http", "method": "GET", "path": path, "headers": headers, "client": (client, 5)}


def keys(clock: list[float] | None = None, **settings: Any) -> WrongKeys:
    now = clock or [0.0]
    return WrongKeys(Addresses(Settings(**settings)), LongPolls(), lambda: now[0])


async def delays(known: WrongKeys, count: int, **scope: Any) -> list[float]:
    found = []
    for _ in range(count):
        delay = known.count(scope_of(**scope), Unauthorized("no"))
        assert delay is not None
        found.append(delay.seconds)
        known.release(delay.sender)
    return found


async def test_the_delay_doubles_for_each_sender_up_to_a_limit_and_is_forgotten_in_time() -> None:
    clock = [0.0]
    known = keys(clock)
    found = await delays(known, 2000)
    assert found[0] > 0 and all(after == min(2 * before, LONGEST_S) for before, after in pairwise(found))
    assert found[-1] == LONGEST_S
    assert await delays(known, 1, client="10.0.0.2") == found[:1]
    clock[0] = 100.0
    assert await delays(known, 1) == [LONGEST_S]
    clock[0] = 1000.0
    assert await delays(known, 2) == found[:2]


async def test_the_table_of_senders_is_bounded() -> None:
    known = keys()
    for number in range(3 * MOST_SENDERS):
        await delays(known, 1, client=f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert known.senders == MOST_SENDERS


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2", True),
        ("10.0.0.1", "10.0.0.2", False),
    ],
)
async def test_a_sender_is_an_address_or_a_network_of_ipv6(first: str, second: str, same: bool) -> None:
    known = keys()
    await delays(known, 3, client=first)
    assert (await delays(known, 1, client=second) == (await delays(keys(), 4))[3:]) == same


async def test_behind_a_trusted_proxy_the_sender_is_who_it_names_and_nobody_else_can_name_one() -> None:
    for trusted, same in (("10.0.0.0/8", False), ("*", False), ("192.168.0.1", True), (None, True)):
        known = keys(forwarded_allow_ips=trusted)
        await delays(known, 3, x_forwarded_for="1.1.1.1, 203.0.113.1")
        assert (await delays(known, 1, x_forwarded_for="1.1.1.1, 203.0.113.2") != (await delays(keys(), 1))) == same
    known = keys(forwarded_allow_ips="10.0.0.0/8")
    await delays(known, 3, x_forwarded_for="made-up-1, 203.0.113.1")
    assert (await delays(known, 1, x_forwarded_for="made-up-2, 203.0.113.1"))[0] > (await delays(keys(), 1))[0]


@pytest.mark.parametrize(
    ("error", "scope", "counts"),
    [
        (Unauthorized("x"), {}, True),
        (WrongKey("x"), {}, True),
        (Unauthorized("x"), {"key": None}, False),
        (Unauthorized("x"), {"key": None, "path": "/~guess/v1/messages"}, True),
        (Unauthorized("x"), {"key": None, "x_api_key": "guess"}, True),
        (Forbidden("x"), {}, False),
        (SessionClosed("x"), {}, False),
    ],
)
async def test_what_counts_as_a_wrong_key(error: ProxyError, scope: dict[str, Any], counts: bool) -> None:
    assert (keys().count(scope_of(**scope), error) is not None) == counts


async def test_of_many_at_once_few_wait_and_the_others_are_told_when_to_come_again() -> None:
    known = keys()
    for sender in range(MOST_WAITING):
        assert known.count(scope_of(f"10.0.1.{sender}"), Unauthorized("x")) is not None
    with pytest.raises(TooManyRequests) as refused:
        known.count(scope_of("10.0.2.1"), Unauthorized("x"))
    assert refused.value.retry_after_s
    known = keys()
    for _ in range(MOST_OF_ONE):
        known.count(scope_of(), Unauthorized("x"))
    answer = error_response({**scope_of(), WRONG_KEYS: known}, Unauthorized("x"))
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert known.waiting == MOST_OF_ONE


async def slowed(server: Server) -> tuple[WrongKeys, Held]:
    polls = Held()
    server.app.wrong_keys = WrongKeys(Addresses(Settings()), polls)
    return server.app.wrong_keys, polls


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_right_keys_are_answered_while_wrong_ones_of_their_sender_wait(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok"), admin_key=f"{KEY},{OLD}", max_turns_in_flight=1) as server:
        known, polls = await slowed(server)
        calls = [("GET", "/rl/sessions", None), ("POST", "/s/v1/chat/completions", TURN), ("GET", "/engine", None)]
        waiting = [
            asyncio.create_task(server.http.request(method, path, json=body, headers=bearer(f"guess-{path}")))
            for method, path, body in calls
        ]
        for _ in calls:
            await polls.begun.get()
        assert known.waiting == len(calls) and server.app.state.turns.running.count == 0
        started = await server.post("/rl/start_session", {"task_id": "t"}, headers=bearer(OLD))
        agent = bearer(started.json()["api_key"])
        assert (await server.http.post("/v1/chat/completions", json=TURN, headers=agent)).status_code == 200
        assert (await server.http.get("/rl/sessions", headers=bearer(KEY))).status_code == 200
        assert not any(task.done() for task in waiting)
        polls.go.set()
        assert [(await task).status_code for task in waiting] == [403, 401, 403]
        assert known.waiting == 0


async def test_a_stop_ends_every_wait_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, says("ok"), admin_key=KEY) as server:
        known, polls = await slowed(server)
        waiting = asyncio.create_task(server.http.get("/rl/sessions", headers=bearer("wrong")))
        await polls.begun.get()
        polls.end()
        assert (await waiting).status_code == 403
        response: httpx.Response = await server.http.get("/rl/sessions", headers=bearer("wrong"))
        assert response.status_code == 403 and polls.begun.empty() and known.waiting == 0
