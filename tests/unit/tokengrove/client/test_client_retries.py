"""Both clients repeat control calls while a server is away, and each call is done once, however often it is sent."""

from __future__ import annotations

import asyncio
import inspect
import json
import ssl
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.wide import CROSSED
from tokengrove.client import AsyncClient, AsyncSession, Client, ServerUnreachable, Session, operations
from tokengrove.client.export_files import export_files
from tokengrove.client.retries import Clock
from tokengrove.client.unreachable import NoAddress
from tokengrove.errors import SHUTTING_DOWN, InvalidRequest, NotFound, ProxyError, StoreUnavailable, TooManyRequests

KEYS = {"session_id": "s", "api_key": "a", "control_key": "c", "base_url": "b", "root_url": "r", "keys_expire_at": None}
ANSWERS: dict[str, Any] = {
    "start_session": KEYS,
    "set_reward": {"interaction_ids": ["i"]},
    "end_session": {"interaction_count": 1},
    "claim": {"claim_id": "c", "lease_until": 1.0, "sessions": []},
    "acknowledge": {"acknowledged": ["s"], "lost": {}},
    "grant_capacity": {"capacity": 1},
    "sessions": {"sessions": [], "cursor": None},
}


class World(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """A server in this process: it does each call once for each Idempotency-Key, and counts what it did in `effects`.

    Each of the first requests meets one of `faults`: before the server has it, or, if the fault is in `LOST`, after the
    server did it and before the answer arrives.
    """

    def __init__(self, *faults: Any) -> None:
        self.faults = list(faults)
        self.effects: Counter[str] = Counter()
        self.keys: list[str | None] = []
        self._done: dict[tuple[str, bytes], httpx.Response] = {}

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        self.keys.append(request.headers.get("idempotency-key"))
        fault = self.faults.pop(0) if self.faults else None
        if fault in LOST:
            self._answer(request)
        if fault is None:
            return self._answer(request)
        if isinstance(fault, httpx.Response):
            return httpx.Response(fault.status_code, headers=fault.headers, content=fault.content)
        raise fault("it failed", request=request)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        await request.aread()
        return self.handle_request(request)

    def _answer(self, request: httpx.Request) -> httpx.Response:
        name, key = request.url.path.rpartition("/")[2], request.headers.get("idempotency-key")
        if key is None:
            self.effects[name] += 1
            return httpx.Response(200, json=ANSWERS.get(name, {}))
        if (key, request.content) not in self._done:
            self.effects[name] += 1
            self._done[key, request.content] = httpx.Response(200, json=ANSWERS.get(name, {}))
        return self._done[key, request.content]


class TestClock(Clock):
    """Time that passes by waiting only. `shares`: of each pause, what chance says."""

    __test__ = False

    def __init__(self) -> None:
        self.time, self.pauses, self.chance = 0.0, list[float](), 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time += seconds

    async def wait(self, seconds: float) -> None:
        self.sleep(seconds)

    def share(self) -> float:
        return self.chance


def refusal(status: int, code: str, retry_after: str | None = None, message: str = "away") -> httpx.Response:
    headers = {} if retry_after is None else {"retry-after": retry_after}
    return httpx.Response(status, headers=headers, json={"error": {"message": message, "code": code}})


AWAY = refusal(503, "store_unavailable", "1")
FULL = refusal(429, "rate_limit_exceeded", "3")
GATEWAY = httpx.Response(502, text="<html>bad gateway</html>")
STOPPING = refusal(503, "engine_unavailable", "1", SHUTTING_DOWN)
UNSENT: tuple[Any, ...] = (httpx.ConnectError, httpx.ConnectTimeout)
BROKEN: tuple[Any, ...] = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError, httpx.ReadTimeout)
LOST = BROKEN

Kind = type[Client] | type[AsyncClient]
both = pytest.mark.parametrize("kind", [Client, AsyncClient])


def made(kind: Kind, world: World, **options: Any) -> tuple[Any, TestClock]:
    client: Any = kind("http://server", **options)
    client._http = httpx.Client(transport=world) if kind is Client else httpx.AsyncClient(transport=world)
    client.clock = TestClock()
    return client, client.clock


def session_of(client: Any) -> Any:
    return (Session if isinstance(client, Client) else AsyncSession)(client, KEYS)


def done(result: Any) -> Any:
    return asyncio.run(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(result: Any) -> Any:
    return await result


CALLS: dict[str, Callable[[Any], Any]] = {
    "start_session": lambda client: client.start_session("task"),
    "set_reward": lambda client: session_of(client).set_reward(1.0),
    "end_session": lambda client: session_of(client).end(),
    "claim": lambda client: client.claim(limit=4),
    "acknowledge": lambda client: client.acknowledge("c"),
    "grant_capacity": lambda client: client.grant_capacity(),
}


@CROSSED
@both
@pytest.mark.parametrize("fault", [*UNSENT, AWAY, FULL, GATEWAY, STOPPING, *LOST])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_fails_on_its_way_or_whose_answer_is_lost_is_done_once(kind: Kind, name: str, fault: Any) -> None:
    world = World(fault, fault, fault)
    client, clock = made(kind, world)
    done(CALLS[name](client))
    assert world.effects == {name: 1}
    assert (len(world.keys), len(set(world.keys)), None in world.keys) == (4, 1, False)
    assert len(clock.pauses) == 3


@both
def test_two_equal_calls_are_two_calls(kind: Kind) -> None:
    world = World()
    client, _ = made(kind, world)
    for _ in range(2):
        done(session_of(client).set_reward(1.0))
    assert (world.effects["set_reward"], len(set(world.keys))) == (2, 2)


@both
def test_the_key_of_a_caller_is_that_of_all_attempts(kind: Kind) -> None:
    world = World(AWAY, httpx.ReadError)
    client, _ = made(kind, world)
    for _ in range(2):  # as a process does that died after the first, and starts again
        done(client.start_session("task", idempotency_key="mine"))
    assert (world.effects, set(world.keys)) == ({"start_session": 1}, {"mine"})
    for name in ("set_reward", "end"):
        done(getattr(session_of(client), name)(idempotency_key=f"of-{name}"))
    done(client.claim(idempotency_key="of-claim"))
    done(client.grant_capacity(idempotency_key="of-grant"))
    assert world.keys[-4:] == ["of-set_reward", "of-end", "of-claim", "of-grant"]
    for wrong in ("", "caf\u00e9", "a\nb", "a b", "k" * 256):
        with pytest.raises(InvalidRequest, match="'idempotency_key' must be 1 to 255 visible ASCII"):
            done(client.claim(idempotency_key=wrong))


@both
def test_reads_are_repeated_without_a_key(kind: Kind) -> None:
    world = World(AWAY, httpx.ReadError)
    client, _ = made(kind, world)
    assert done(client.sessions()) == []
    assert world.keys == [None] * 3


@both
def test_pauses_grow_by_chance_and_are_as_long_as_the_server_asks_for(kind: Kind) -> None:
    client, clock = made(kind, World(*[httpx.ConnectError] * 7))
    done(client.sessions())
    assert clock.pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 5.0, 5.0]
    client, clock = made(kind, World(*[httpx.ConnectError] * 3))
    clock.chance = 0.5
    done(client.sessions())
    assert clock.pauses == [0.1875, 0.375, 0.75]
    client, clock = made(kind, World(FULL, FULL))
    clock.chance = 0.5
    done(client.sessions())
    assert clock.pauses == [3.375, 3.375]


@both
def test_a_gateway_may_write_a_date_as_retry_after(kind: Kind) -> None:
    for date in ("Fri, 31 Dec 1999 23:59:59 GMT", "Mon, 31 Dec 2999 23:59:59 GMT"):
        world = World(refusal(429, "rate_limit_exceeded", date))
        client, clock = made(kind, world)
        if "1999" in date:
            done(client.sessions())
            assert clock.pauses == [0.25]
        else:
            with pytest.raises(TooManyRequests):
                done(client.sessions())
            assert clock.pauses == []


@both
@pytest.mark.parametrize("fault", [AWAY, FULL, httpx.ConnectError])
def test_the_last_error_is_raised_after_retry_s_and_says_for_how_long_it_was_tried(kind: Kind, fault: Any) -> None:
    client, clock = made(kind, World(*[fault] * 1000), retry_s=20)
    with pytest.raises(ProxyError) as caught:
        done(client.start_session("task"))
    assert 17.0 <= sum(clock.pauses) <= 20.0
    assert f"(tried {len(clock.pauses) + 1} times in {sum(clock.pauses):.1f} s)" in str(caught.value)
    assert str(caught.value) == caught.value.message


def test_by_default_a_call_is_repeated_for_two_minutes() -> None:
    client, clock = made(Client, World(*[AWAY] * 1000))
    with pytest.raises(StoreUnavailable):
        client.sessions()
    assert sum(clock.pauses) == 120.0


@both
@pytest.mark.parametrize("fault", [AWAY, FULL, httpx.ConnectError, httpx.ReadError])
def test_with_retry_s_0_nothing_is_repeated(kind: Kind, fault: Any) -> None:
    world = World(fault)
    client, clock = made(kind, world, retry_s=0)
    with pytest.raises((StoreUnavailable, TooManyRequests, ServerUnreachable)) as caught:
        done(client.start_session("task"))
    assert (len(world.keys), clock.pauses) == (1, [])
    assert "tried" not in str(caught.value)


@both
@pytest.mark.parametrize("retry_s", [-1.0, float("nan")])
def test_a_retry_s_that_is_no_time_is_refused_by_name(kind: Kind, retry_s: float) -> None:
    with pytest.raises(InvalidRequest, match="'retry_s'") as caught:
        kind("http://server", retry_s=retry_s)
    assert caught.value.param == "retry_s"


@both
@pytest.mark.parametrize(
    "final",
    [
        refusal(404, "session_not_found"),
        refusal(400, "invalid_request"),
        refusal(409, "ended_otherwise"),
        refusal(429, "rate_limit_exceeded"),
        refusal(500, "internal_error"),
        refusal(501, "engine_incapable"),
    ],
    ids=lambda answer: str(answer.status_code),
)
def test_answers_that_are_final_are_raised_at_once(kind: Kind, final: httpx.Response) -> None:
    world = World(AWAY, final)
    client, clock = made(kind, world)
    with pytest.raises(ProxyError) as caught:
        done(session_of(client).set_reward(1.0))
    assert (caught.value.status, len(clock.pauses), len(world.keys)) == (final.status_code, 1, 2)


@both
def test_an_untrusted_certificate_and_an_address_that_is_none_are_told_at_once(kind: Kind) -> None:
    def distrusted(message: str, request: httpx.Request) -> httpx.ConnectError:
        error = httpx.ConnectError(message, request=request)
        error.__cause__ = ssl.SSLCertVerificationError("certificate verify failed")
        return error

    for fault in (distrusted, httpx.LocalProtocolError, httpx.UnsupportedProtocol):
        client, clock = made(kind, World(fault))
        with pytest.raises(NoAddress):
            done(client.start_session("task"))
        assert clock.pauses == []


ONCE: dict[str, Callable[[Any], Any]] = {
    "health": lambda client: client.health(),
    "ready": lambda client: client.ready(),
    "generate": lambda client: client.generate([1]),
    "a turn": lambda client: session_of(client).generate([1], idempotency_key="k"),
}


@both
@pytest.mark.parametrize("fault", [AWAY, FULL, httpx.ConnectError, httpx.ReadError])
@pytest.mark.parametrize("name", ONCE)
def test_turns_and_questions_about_this_moment_are_not_repeated(kind: Kind, name: str, fault: Any) -> None:
    world = World(fault)
    client, _ = made(kind, world)
    with pytest.raises((StoreUnavailable, TooManyRequests, ServerUnreachable)):
        done(ONCE[name](client))
    assert len(world.keys) == 1


ENGINE: dict[str, Callable[[Any], Any]] = {
    "update_weights": lambda client: client.update_weights("w"),
    "servers": lambda client: client.add_server("http://a"),
    "next": lambda client: client.next_request(),
    "deliver": lambda client: client.deliver(interaction_id="i", text="t"),
}


@both
@pytest.mark.parametrize("name", ENGINE)
def test_what_could_be_done_twice_is_repeated_only_if_it_did_not_arrive(kind: Kind, name: str) -> None:
    for fault in BROKEN:
        world = World(fault)
        client, _ = made(kind, world)
        with pytest.raises(ServerUnreachable):
            done(ENGINE[name](client))
        assert world.effects == {name: 1}
    for fault in UNSENT:
        world = World(fault, refusal(404, "not_found"))
        client, _ = made(kind, world)
        with pytest.raises(NotFound):
            done(ENGINE[name](client))
        assert (len(world.keys), world.effects) == (2, {})


@both
def test_an_operation_a_start_and_an_end_may_have_a_patience_of_their_own(kind: Kind) -> None:
    client, clock = made(kind, World(*[AWAY] * 1000), retry_s=0)
    with pytest.raises(StoreUnavailable):
        done(client.run(operations.sessions(), retry_s=5.0))
    assert sum(clock.pauses) == 5.0
    with pytest.raises(StoreUnavailable):
        done(client.start_session("task", retry_s=4.0))
    assert sum(clock.pauses) == 9.0
    with pytest.raises(StoreUnavailable):
        done(session_of(client).end(retry_s=3.0))
    assert sum(clock.pauses) == 12.0


def test_ctrl_c_ends_the_wait_of_a_blocking_call() -> None:
    client, clock = made(Client, World(*[AWAY] * 1000))

    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    clock.sleep = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        client.sessions()


async def test_the_wait_of_an_asyncio_call_can_be_cancelled() -> None:
    client, clock = made(AsyncClient, World(*[AWAY] * 1000))
    waits = asyncio.Event()

    async def wait(seconds: float) -> None:
        waits.set()
        await asyncio.Event().wait()

    clock.wait = wait  # type: ignore[method-assign]
    asking = asyncio.create_task(client.sessions())
    await waits.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


@both
@pytest.mark.parametrize(("error", "patience_s"), [(ValueError, 120.0), (KeyboardInterrupt, 10.0)])
def test_the_end_of_a_block_is_repeated_for_a_short_time_if_somebody_wants_to_leave(
    kind: Kind, error: type[BaseException], patience_s: float
) -> None:
    world = World()
    client, clock = made(kind, world)

    def failing() -> BaseException:
        world.faults = [AWAY] * 1000
        return error("of the block")

    if kind is Client:
        with pytest.raises(error, match="of the block"), client.session("task"):
            raise failing()
    else:

        async def block() -> None:
            async with client.session("task"):
                raise failing()

        with pytest.raises(error, match="of the block"):
            asyncio.run(block())
    assert sum(clock.pauses) == patience_s


def test_a_body_that_was_sent_again_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: list[Any] = []
    answer = World._answer

    def noted(world: World, request: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(request.content))
        return answer(world, request)

    monkeypatch.setattr(World, "_answer", noted)
    client, _ = made(Client, World(httpx.ReadError))
    client.claim(limit=4, filter={"group_id": "g"})
    assert bodies == [{"limit": 4, "filter": {"group_id": "g"}}] * 2


class Pages(httpx.BaseTransport):
    """Two pages of an export; each of the first requests meets one of `faults`, `breaks` in the middle of a page."""

    def __init__(self, *faults: Any) -> None:
        self.faults, self.asked = list(faults), 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, httpx.Response):
            return httpx.Response(fault.status_code, headers=fault.headers, content=fault.content)
        if fault is not None and fault is not breaks:
            raise fault("it failed", request=request)
        headers = {"x-tokengrove-sessions": "2", "x-tokengrove-incomplete": "0"}
        if "cursor" not in json.loads(request.read()):
            headers["x-tokengrove-cursor"] = "more"
        return httpx.Response(200, headers=headers, content=breaks() if fault is breaks else b"page")


def breaks() -> Iterator[bytes]:
    yield b"pa"
    raise httpx.ReadError("it broke")


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[float]]]:
    """Exports from pages with faults, and returns how many sessions it wrote and the pauses."""
    clock = TestClock()
    monkeypatch.setattr("tokengrove.client.transport.Clock", lambda: clock)

    def run(pages: Pages, retry_s: float = 120.0) -> tuple[int, list[float]]:
        with httpx.Client(transport=pages) as http:
            monkeypatch.setattr("tokengrove.client.export_files.httpx.stream", http.stream)
            tally = export_files("http://server", None, tmp_path / "out", {}, "tablets", quiet=True, retry_s=retry_s)
        return tally.sessions, clock.pauses

    return run


def test_a_page_of_an_export_is_asked_for_again_until_its_first_byte_has_come(exported: Any) -> None:
    pages = Pages(AWAY, None, httpx.ConnectError, httpx.ReadError, GATEWAY)
    assert exported(pages) == (4, [1.0, 0.25, 0.5, 1.0])


def test_a_page_of_an_export_that_broke_off_is_not_asked_for_again(exported: Any) -> None:
    pages = Pages(None, breaks)
    with pytest.raises(ServerUnreachable, match="it broke"):
        exported(pages)
    assert pages.asked == 2


@pytest.mark.parametrize(("fault", "retry_s"), [(httpx.ConnectError, 120.0), (AWAY, 0.0)])
def test_an_export_from_where_nothing_answers_fails_at_once(exported: Any, fault: Any, retry_s: float) -> None:
    pages = Pages(fault)
    with pytest.raises((ServerUnreachable, StoreUnavailable)):
        exported(pages, retry_s)
    assert pages.asked == 1
