"""The events of a server: read from any pieces, as they come; errors and the end of the stream."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import aclosing, closing
from typing import Any

import pytest

from tokengrove.client import AsyncClient, Client, ServerEvent, ServerUnreachable
from tokengrove.client.asgi import Message
from tokengrove.client.server_events import EventReader
from tokengrove.errors import ProxyError, Unauthorized

STREAM = (
    "retry: 2000\n\n"
    ": keepalive\n\n"
    'event: sessions\ndata: {"changed": ["a\u2028b", "\u00e9"], "all": false}\n\n'
    'event: statistics\r\nid: 4\r\ndata: {"at":\r\ndata: 1}\r\n\r\n'
).encode()
EVENTS = [
    ServerEvent("sessions", {"changed": ["a\u2028b", "\u00e9"], "all": False}),
    ServerEvent("statistics", {"at": 1}),
]

Send = Callable[[Message], Any]


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
def test_events_are_read_from_pieces_of_any_size(size: int) -> None:
    reader = EventReader()
    pieces = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_an_event_without_a_name_is_a_message_whatever_came_before() -> None:
    named, plain = list(EventReader().feed(b"event: sessions\ndata: 1\n\ndata: 2\n\n"))
    assert (named, plain) == (ServerEvent("sessions", 1), ServerEvent("message", 2))


def test_data_that_are_not_json_are_an_error_that_names_the_event() -> None:
    with pytest.raises(ProxyError, match="'odd'"):
        list(EventReader().feed(b"event: odd\ndata: <html>\n\n"))


class Stream:
    """An application that streams; it ends when told to, and knows what was asked and whether its client left."""

    def __init__(self, status: int = 200, *, ends: bool = True, parts: tuple[bytes, ...] = (STREAM,)) -> None:
        self.status, self.ends, self.parts = status, ends, parts
        self.asked: list[str] = []
        self.left = threading.Event()

    async def __call__(self, scope: Message, receive: Callable[[], Any], send: Send) -> None:
        if scope["type"] != "http":
            raise ValueError("no lifespan")
        self.asked.append(f"{scope['path']}?{scope['query_string'].decode()}")
        await receive()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for part in self.parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        if not self.ends:
            assert (await receive())["type"] == "http.disconnect"
            self.left.set()
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_the_blocking_client_yields_events_until_the_stream_ends() -> None:
    app = Stream()
    with Client(app=app) as client:
        assert list(client.events(["statistics", "sessions"])) == EVENTS
    assert app.asked == ["/rl/events?events=statistics%2Csessions"]


async def test_the_async_client_yields_events_until_the_stream_ends() -> None:
    app = Stream()
    async with AsyncClient(app=app) as client:
        assert [event async for event in client.events()] == EVENTS
    assert app.asked == ["/rl/events?"]


def test_an_event_is_yielded_before_the_stream_ends_and_closing_disconnects() -> None:
    app = Stream(ends=False)
    with Client(app=app) as client, closing(client.events()) as events:
        assert next(events) == EVENTS[0]
        events.close()
        assert app.left.wait(10)


async def test_the_async_client_disconnects_when_the_iterator_is_closed() -> None:
    app = Stream(ends=False)
    async with AsyncClient(app=app) as client:
        async with aclosing(client.events()) as events:
            assert await anext(events) == EVENTS[0]
        assert await asyncio.to_thread(app.left.wait, 10)


def test_an_error_of_the_server_is_raised_as_its_class() -> None:
    refused = b'{"error": {"message": "the admin key is wrong", "code": "unauthorized"}}'
    with Client(app=Stream(401, parts=(refused,))) as client, pytest.raises(Unauthorized, match="admin key"):
        next(client.events())


def test_a_server_that_is_not_there_is_unreachable() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ServerUnreachable, match=r"127\.0\.0\.1:9"):
        next(client.events())
