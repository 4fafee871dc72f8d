"""The transport to an application of this process: what it hands on, when, and what either side learns of the other."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
from collections.abc import AsyncIterator, Callable
from contextvars import ContextVar
from typing import Any

import httpx
import httpx2
import pytest

from tokengrove.client import AsyncClient, Client
from tokengrove.client.asgi import ASGIApp, Message
from tokengrove.client.http_clients import IN_PROCESS

Receive = Callable[[], Any]
Send = Callable[[Message], Any]


def start(status: int = 200, headers: tuple[tuple[bytes, bytes], ...] = ()) -> Message:
    return {"type": "http.response.start", "status": status, "headers": list(headers)}


def body(part: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": part, "more_body": more}


def without_lifespan(answer: Callable[[Message, Receive, Send], Any]) -> ASGIApp:
    """An application that answers requests with `answer` and refuses a lifespan, as older ones do."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError("this application has no lifespan")
        await answer(scope, receive, send)

    return app


async def echo(scope: Message, receive: Receive, send: Send) -> None:
    """Answer with the body of the request and headers that describe it."""
    content = (await receive())["body"]
    described = f"{scope['method']} {scope['raw_path'].decode()} {scope['path']} {scope['query_string'].decode()}"
    await send(start(201, ((b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"), (b"x-request", described.encode()))))
    await send(body(content, more=False))


async def test_a_request_and_its_answer_are_handed_on_whole() -> None:
    large = b"x" * 20_000_000
    async with AsyncClient(app=without_lifespan(echo)) as client, client.http_client() as http:
        answer = await http.put(f"{IN_PROCESS}/a%20b/c?d=e%20f", content=large)
    assert answer.status_code == 201
    assert answer.content == large
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert answer.headers["x-request"] == "PUT /a%20b/c /a b/c d=e%20f"


def test_a_blocking_client_hands_on_the_same() -> None:
    with Client(app=without_lifespan(echo)) as client, client.http_client("httpx2") as http:
        assert isinstance(http, httpx2.Client)
        answer = http.post(f"{IN_PROCESS}/p", content=b"x" * 1_000_000)
    assert (answer.status_code, len(answer.content)) == (201, 1_000_000)


async def test_the_answer_to_head_has_no_body() -> None:
    async with AsyncClient(app=without_lifespan(echo)) as client, client.http_client() as http:
        answer = await http.request("HEAD", IN_PROCESS, content=b"abc")
    assert (answer.status_code, answer.content) == (201, b"")


async def test_each_part_arrives_before_the_next_is_sent() -> None:
    asked = asyncio.Event()

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        for part in (b"one", b"two", b"three"):
            await asked.wait()
            asked.clear()
            await send(body(part))
        await send(body(b"", more=False))

    async with (
        AsyncClient(app=without_lifespan(answer)) as client,
        client.http_client() as http,
        http.stream("GET", IN_PROCESS) as response,
    ):
        parts = response.aiter_raw()
        for expected in (b"one", b"two", b"three"):
            asked.set()
            assert await anext(parts) == expected
        assert [part async for part in parts] == []


def test_a_blocking_reader_gets_each_part_before_the_next_is_sent() -> None:
    asked = threading.Event()

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        for part in (b"one", b"two"):
            await asyncio.to_thread(asked.wait)
            asked.clear()
            await send(body(part))
        await send(body(b"", more=False))

    with (
        Client(app=without_lifespan(answer)) as client,
        client.http_client() as http,
        http.stream("GET", IN_PROCESS) as response,
    ):
        parts = response.iter_raw()
        for expected in (b"one", b"two"):
            asked.set()
            assert next(parts) == expected
        assert list(parts) == []


class Endless:
    """Answers with parts of 16 KiB until its client leaves. `sent`: how many parts; `told`: whether it has learned."""

    def __init__(self) -> None:
        self.sent = 0
        self.told = asyncio.Event()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError("no lifespan")
        await receive()
        sending = asyncio.create_task(self._send(send))
        assert (await receive())["type"] == "http.disconnect"
        sending.cancel()
        self.told.set()

    async def _send(self, send: Send) -> None:
        await send(start())
        while True:
            await send(body(b"x" * 16384))
            self.sent += 1


async def test_the_application_waits_for_a_reader_that_is_behind() -> None:
    app = Endless()
    async with AsyncClient(app=app) as client, client.http_client() as http, http.stream("GET", IN_PROCESS) as response:
        for _ in range(100):
            await asyncio.sleep(0)
        assert app.sent < 5
        parts = response.aiter_raw()
        for _ in range(10):
            assert len(await anext(parts)) <= 5 * 16384
        assert app.sent >= 10


async def leave_by_the_end_of_the_block(http: httpx.AsyncClient) -> None:
    async with http.stream("GET", IN_PROCESS) as response:
        await anext(response.aiter_raw())


async def leave_by_an_exception(http: httpx.AsyncClient) -> None:
    with pytest.raises(LookupError):
        async with http.stream("GET", IN_PROCESS) as response:
            async for _ in response.aiter_raw():
                raise LookupError


async def leave_by_cancellation(http: httpx.AsyncClient) -> None:
    task = asyncio.create_task(http.get(IN_PROCESS))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def leave_by_closing_the_client(http: httpx.AsyncClient) -> None:
    response = await http.send(http.build_request("GET", IN_PROCESS), stream=True)
    await http.aclose()
    await response.aclose()


async def leave_by_dropping_the_response(http: httpx.AsyncClient) -> None:
    await http.send(http.build_request("GET", IN_PROCESS), stream=True)
    gc.collect()  # a response of httpx refers to itself


@pytest.mark.parametrize(
    "leave",
    [
        leave_by_the_end_of_the_block,
        leave_by_an_exception,
        leave_by_cancellation,
        leave_by_closing_the_client,
        leave_by_dropping_the_response,
    ],
)
async def test_the_application_is_told_that_its_client_has_left(
    leave: Callable[[httpx.AsyncClient], Any],
) -> None:
    app = Endless()
    async with AsyncClient(app=app) as client, client.http_client() as http:
        await leave(http)
        await asyncio.wait_for(app.told.wait(), 60)


def test_the_application_is_told_that_a_blocking_client_has_left() -> None:
    told = threading.Event()

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        await send(body(b"part"))
        await receive()
        assert (await receive())["type"] == "http.disconnect"
        told.set()

    with Client(app=without_lifespan(answer)) as client, client.http_client() as http:
        with http.stream("GET", IN_PROCESS) as response:
            assert next(response.iter_raw()) == b"part"
        assert told.wait(60)


async def test_closing_the_last_client_disconnects_those_who_still_read() -> None:
    app = Endless()
    client = AsyncClient(app=app)
    async with client.http_client() as http, http.stream("GET", IN_PROCESS) as response:
        await client.aclose()
        assert app.told.is_set()
        with pytest.raises(httpx.RemoteProtocolError, match="before the end of its answer"):
            await response.aread()


async def test_many_requests_run_at_once() -> None:
    together = asyncio.Barrier(50)

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await together.wait()
        await echo(scope, receive, send)

    async with AsyncClient(app=without_lifespan(answer)) as client, client.http_client() as http:
        answers = await asyncio.gather(*(http.post(IN_PROCESS, content=b"%d" % n) for n in range(50)))
    assert [answer.content for answer in answers] == [b"%d" % n for n in range(50)]


@pytest.mark.parametrize("library", ["httpx", "httpx2"])
async def test_a_failed_application_is_a_500_and_is_logged(caplog: pytest.LogCaptureFixture, library: Any) -> None:
    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        raise LookupError("the reason")

    async with AsyncClient(app=without_lifespan(answer)) as client, client.http_client(library) as http:
        response = await http.get(IN_PROCESS)
    assert (response.status_code, response.text) == (500, "Internal Server Error")
    assert "the reason" in caplog.text


async def test_an_application_that_does_not_answer_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await receive()

    async with AsyncClient(app=without_lifespan(answer)) as client, client.http_client() as http:
        assert (await http.get(IN_PROCESS)).status_code == 500
    assert "without an answer" in caplog.text


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_an_answer_that_breaks_off_is_an_error_of_the_library(
    caplog: pytest.LogCaptureFixture, library: Any
) -> None:
    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        await send(body(b"half"))
        raise LookupError("the reason")

    async with (
        AsyncClient(app=without_lifespan(answer)) as client,
        client.http_client(library.__name__) as http,
        http.stream("GET", IN_PROCESS) as response,
    ):
        parts = response.aiter_raw()
        assert await anext(parts) == b"half"
        with pytest.raises(library.RemoteProtocolError):
            await anext(parts)
    assert "the reason" in caplog.text


@pytest.mark.parametrize("library", [httpx, httpx2])
async def test_an_answer_that_takes_longer_than_the_timeout_is_an_error_of_the_library(library: Any) -> None:
    told = asyncio.Event()

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await receive()
        told.set()

    app = without_lifespan(answer)
    async with AsyncClient(app=app) as client, client.http_client(library.__name__, timeout_s=0.01) as http:
        with pytest.raises(library.ReadTimeout):
            await http.get(IN_PROCESS)
        await asyncio.wait_for(told.wait(), 60)


def test_a_blocking_reader_has_the_same_timeout() -> None:
    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await receive()

    with (
        Client(app=without_lifespan(answer)) as client,
        client.http_client("httpx2", timeout_s=0.01) as http,
        pytest.raises(httpx2.ReadTimeout),
    ):
        http.get(IN_PROCESS)


async def test_other_addresses_are_not_those_of_the_application() -> None:
    async with AsyncClient(app=without_lifespan(echo)) as client, client.http_client() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get("http://127.0.0.1:1/")


async def uploaded() -> AsyncIterator[bytes]:
    yield b"one "
    yield b"two"


async def test_a_body_that_is_made_while_it_is_sent_arrives_whole() -> None:
    async with AsyncClient(app=without_lifespan(echo)) as client, client.http_client() as http:
        assert (await http.post(IN_PROCESS, content=uploaded())).content == b"one two"


async def test_variables_of_the_callers_context_do_not_reach_the_application() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="none")

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        await send(body(variable.get().encode(), more=False))

    variable.set("the agent's")
    async with AsyncClient(app=without_lifespan(answer)) as client, client.http_client() as http:
        assert (await http.get(IN_PROCESS)).text == "none"


@pytest.fixture(autouse=True)
def logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "tokengrove.client.asgi")


async def test_an_application_that_waits_for_its_reader_goes_on_when_the_reader_leaves() -> None:
    ended = asyncio.Event()

    async def answer(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        for _ in range(4):
            await send(body(b"x" * 100_000))
        ended.set()

    async with AsyncClient(app=without_lifespan(answer)) as client, client.http_client() as http:
        async with http.stream("GET", IN_PROCESS):
            assert not ended.is_set()
        await ended.wait()
