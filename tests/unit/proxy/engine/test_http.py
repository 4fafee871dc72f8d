"""The HTTP client of engine servers: framing, kept connections, cancelled and broken answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import orjson
import pytest

from proxy.engine.servers import http
from proxy.engine.servers.connection import EventStream, Keys, ServerConnection, Stopped
from proxy.engine.servers.http import Disconnected, Exchange, HttpClient
from tests.support import let_pass, until
from tokengrove.errors import EngineFailed, EngineLost, InvalidRequest

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"


class Server:
    """Answers each request of a connection by `answer`; remembers requests and connections."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.requests: list[tuple[bytes, bytes]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.closed = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
                self.requests.append((head, await reader.readexactly(length)))
                await self.answer(reader, writer)
                await writer.drain()
        self.closed += 1
        writer.close()


@contextlib.asynccontextmanager
async def serving(answer: Answer) -> AsyncIterator[tuple[Server, HttpClient]]:
    server = Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}")
    try:
        yield server, client
    finally:
        client.close()
        listener.close()
        for writer in server.writers:
            writer.close()
        await until(lambda: server.closed == len(server.writers))


def whole(body: bytes, *heads: bytes) -> Answer:
    async def answer(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"".join(head + b"\r\n" for head in heads) + b"content-length: %d\r\n\r\n" % len(body) + body)

    return answer


def pieces(*texts: bytes, ends: bool = True) -> Answer:
    """A chunked answer; each text arrives in a read of its own."""

    async def answer(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"transfer-encoding: chunked\r\n\r\n")
        for text in texts:
            writer.write(b"%x\r\n%b\r\n" % (len(text), text))
            await writer.drain()
            await asyncio.sleep(0.001)
        if ends:
            writer.write(b"0\r\n\r\n")

    return answer


async def ask(client: HttpClient, exchange: Exchange | None = None, *, repeat: bool = True) -> Exchange:
    exchange = exchange or Exchange()
    await client.send(exchange, client.head("POST", "/x", {"a": "b"}), [b"{", b"}"], repeat=repeat)
    return exchange


async def test_a_request_is_sent_whole_and_its_connection_serves_the_next() -> None:
    async with serving(whole(b"hello")) as (server, client):
        answers = [await ask(client) for _ in range(3)]
        assert [(answer.status, bytes(answer.body)) for answer in answers] == [(200, b"hello")] * 3
        assert len(server.writers) == 1
        head, body = server.requests[0]
        assert head.startswith(b"POST /x HTTP/1.1\r\nhost: 127.0.0.1:") and b"\r\na: b\r\n" in head and body == b"{}"


async def test_concurrent_requests_have_connections_of_their_own() -> None:
    async with serving(whole(b"hello")) as (server, client):
        await asyncio.gather(*(ask(client) for _ in range(5)))
        assert len(server.writers) == 5


async def test_a_request_that_must_not_be_repeated_gets_a_new_connection() -> None:
    async with serving(whole(b"hello")) as (server, client):
        for _ in range(3):
            await ask(client, repeat=False)
        assert len(server.writers) == 3


@pytest.mark.parametrize("heads", [(), (b"connection: close",)])
async def test_a_connection_is_kept_only_if_the_server_keeps_it(heads: tuple[bytes, ...]) -> None:
    async with serving(whole(b"hello", *heads)) as (server, client):
        await ask(client)
        await ask(client)
        assert len(server.writers) == 1 + len(heads)


async def test_a_connection_idle_for_too_long_is_closed_and_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(whole(b"hello")) as (server, client):
        await ask(client)
        await let_pass(http._KEPT_S, monkeypatch)
        await ask(client)
        assert len(server.writers) == 2
        await until(lambda: server.closed == 1)


async def test_a_kept_connection_that_the_server_closes_at_the_request_fails_none() -> None:
    async with serving(whole(b"hello")) as (server, client):
        await ask(client)

        async def close_once(_: object, writer: asyncio.StreamWriter) -> None:
            server.answer = whole(b"again")
            writer.transport.abort()

        server.answer = close_once
        assert (await ask(client)).body == b"again"
        assert len(server.requests) == 3 and len(server.writers) == 2


async def test_a_new_connection_that_is_closed_before_the_answer_is_not_tried_again() -> None:
    async def close(_: object, writer: asyncio.StreamWriter) -> None:
        writer.transport.abort()

    async with serving(close) as (server, client):
        with pytest.raises(Disconnected):
            await ask(client)
        assert len(server.requests) == 1


@pytest.mark.parametrize("begun", [b"content-length: 9\r\n\r\nhel", b"transfer-encoding: chunked\r\n\r\n3\r\nhel"])
async def test_an_answer_that_breaks_off_fails_and_is_not_asked_for_again(begun: bytes) -> None:
    async with serving(whole(b"hello")) as (server, client):
        await ask(client)

        async def break_off(_: object, writer: asyncio.StreamWriter) -> None:
            writer.write(OK + begun)
            await writer.drain()
            writer.close()

        server.answer = break_off
        with pytest.raises(Disconnected):
            await ask(client)
        assert len(server.requests) == 2


async def test_a_connection_that_is_lost_before_the_request_is_sent_fails_the_request() -> None:
    async with serving(whole(b"hello")) as (_, client):
        connection = await client._connect()
        connection.transport.abort()
        await until(lambda: not client._connections)
        with pytest.raises(Disconnected):
            async with asyncio.timeout(5):
                await connection.carry(Exchange(), b"GET / HTTP/1.1\r\n\r\n")


async def test_a_request_that_meets_the_close_of_the_client_fails() -> None:
    async with serving(whole(b"hello")) as (_, client):
        await ask(client)
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(0)
        client.close()
        with pytest.raises(Disconnected):
            async with asyncio.timeout(5):
                await asking


async def test_what_is_not_http_fails() -> None:
    async def speak(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example ESMTP\r\n")

    async with serving(speak) as (_, client):
        with pytest.raises(Disconnected, match="HttpParser"):
            await ask(client)


async def test_an_informational_answer_is_not_the_answer() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n")
        await writer.drain()
        await whole(b"hello")(reader, writer)

    async with serving(answer) as (_, client):
        answered = await ask(client)
        assert (answered.status, answered.body) == (200, b"hello")


async def test_two_answers_to_one_request_fail_it() -> None:
    async def answer(_: object, writer: asyncio.StreamWriter) -> None:
        bad = b"HTTP/1.1 500 Failed\r\ncontent-length: 3\r\n\r\nbad"
        writer.write(OK + b"content-length: 5\r\n\r\nhello" + bad)

    async with serving(answer) as (server, client):
        with pytest.raises(Disconnected):
            await ask(client)
        await until(lambda: server.closed == 1)


@pytest.mark.parametrize("head", [b"HTTP/1.0 200 OK\r\n", OK, OK + b"connection: close\r\n"])
async def test_an_answer_without_a_length_ends_with_its_connection(head: bytes) -> None:
    async def answer(_: object, writer: asyncio.StreamWriter) -> None:
        for piece in (head + b"\r\nhel", b"lo"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.001)
        writer.close()

    async with serving(whole(b"first")) as (server, client):
        await ask(client)  # so that the answer without a length comes by a connection that was kept
        server.answer = answer
        for _ in range(2):
            answered = await ask(client)
            assert (answered.status, answered.body) == (200, b"hello")
        assert not client._kept and len(server.requests) == 3


async def test_a_cancelled_request_closes_its_connection() -> None:
    async with serving(pieces(b"one", ends=False)) as (server, client):
        exchange = Exchange()
        asking = asyncio.create_task(ask(client, exchange))
        await until(lambda: exchange.body == b"one")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: server.closed == 1)


async def test_closing_the_client_ends_requests_in_flight() -> None:
    async with serving(pieces(b"one", ends=False)) as (_, client):
        exchange = Exchange()
        asking = asyncio.create_task(ask(client, exchange))
        await until(lambda: exchange.body == b"one")
        client.close()
        with pytest.raises(Disconnected):
            await asking


async def test_what_nobody_asked_for_closes_a_kept_connection() -> None:
    async with serving(whole(b"hello")) as (server, client):
        await ask(client)
        server.writers[0].write(OK + b"content-length: 0\r\n\r\n")
        await until(lambda: server.closed == 1)
        assert (await ask(client)).body == b"hello"


class Wholes(Exchange):
    """Needs no more after the text "end"."""

    def feed(self, data: bytes) -> bool:
        super().feed(data)
        return self.body.endswith(b"end")


async def test_the_rest_of_an_answer_that_is_not_needed_is_read_and_the_connection_kept() -> None:
    go = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await pieces(b"the end", ends=False)(reader, writer)
        await go.wait()
        writer.write(b"4\r\nmore\r\n0\r\n\r\n")

    async with serving(answer) as (server, client):
        assert (await ask(client, Wholes())).body == b"the end"
        assert (await ask(client, Wholes())).body == b"the end"  # the first connection is not free yet
        assert len(server.writers) == 2
        go.set()
        await until(lambda: len(client._kept) == 2)
        assert (await ask(client, Wholes())).body == b"the end"
        assert len(server.writers) == 2


async def test_the_rest_of_an_answer_that_does_not_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(pieces(b"the end", ends=False)) as (server, client):
        assert (await ask(client, Wholes())).body == b"the end"
        assert not server.closed
        await let_pass(http._REST_S, monkeypatch)
        await until(lambda: server.closed == 1)


async def events_of(answer: Answer, read: Callable[[list[object]], bool] = lambda events: False) -> None:
    """Stream an answer through a connection to its server."""
    server = Server(answer)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    connection = ServerConnection(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    try:
        await connection.stream("/x", [b"{}"], {}, EventStream(read))
    finally:
        await connection.close()
        listener.close()
        await until(lambda: server.closed == len(server.writers))


async def test_events_may_be_cut_anywhere_and_those_that_come_together_are_read_together() -> None:
    text = '"a\u2028\u0085b"'.encode()  # characters at which a line may end, but no event
    stream = b"".join(b"data: " + event + b"\n\n" for event in (b"1", text, b'{"x": [2]}', b"[DONE]"))
    for cut in range(1, len(stream)):
        seen: list[object] = []
        await events_of(pieces(stream[:cut], stream[cut:]), lambda events, seen=seen: bool(seen.extend(events)))
        assert seen == [1, "a\u2028\u0085b", {"x": [2]}]
    together: list[list[object]] = []
    await events_of(pieces(stream), lambda events: bool(together.append(events)))
    assert together == [[1, "a\u2028\u0085b", {"x": [2]}]]


async def test_comments_fields_and_carriage_returns_are_no_events() -> None:
    seen: list[object] = []
    stream = b": hello\r\nevent: x\r\ndata: 1\r\n\r\ndata:2\n\ndata: [DONE]\n\ndata: 3\n\n"
    await events_of(pieces(stream), lambda events: bool(seen.extend(events)))
    assert seen == [1, 2]


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (pieces(b"data: 1\n\n"), EngineLost),
        (pieces(b"data: 1\n\ndata: {\n\n"), EngineFailed),
        (whole(b""), EngineLost),
        (whole(b"<html>It works!</html>\n"), EngineFailed),
    ],
)
async def test_a_stream_without_its_end_or_with_malformed_json_fails(answer: Answer, error: type[Exception]) -> None:
    with pytest.raises(error):
        await events_of(answer)


async def test_what_the_reader_of_events_raises_is_raised() -> None:
    def read(events: list[object]) -> bool:
        raise Stopped

    with pytest.raises(Stopped):
        await events_of(pieces(b"data: 1\n\n", ends=False), read)


@pytest.mark.parametrize("key", ["two words", "line\nbreak", "schlüssel"])
def test_a_key_that_cannot_stand_in_a_header_is_refused(key: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        ServerConnection("http://127.0.0.1:1", Keys(api=key))
    assert key not in raised.value.message


REFUSALS = [
    ({"message": "temperature must be in [0, 2]", "param": "temperature"}, "temperature"),
    ({"message": "unknown", "param": "prompt_embeds"}, None),
    ({"message": "no field is named"}, None),
    ("only a text", None),
]


@pytest.mark.parametrize(("error", "field"), REFUSALS)
async def test_the_sampling_field_that_a_server_refuses_is_told_to_the_client(error: object, field: str | None) -> None:
    text = orjson.dumps({"error": error})

    async def refusal(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))

    with pytest.raises(InvalidRequest) as refused:
        await events_of(refusal)
    told = f" because of its '{field}'" if field else ""
    assert refused.value.param == field
    assert refused.value.shown == f"the engine server refused the request{told}"


async def test_an_event_in_many_parts_is_read_once_it_is_whole() -> None:
    read: list[object] = []
    stream = EventStream(lambda events: bool(read.extend(events)))
    line = b'data: {"rows": "' + b"A" * 1000 + b'"}'
    for at in range(0, len(line), 10):
        assert not stream.feed(line[at : at + 10])
    assert not read and stream.begun is False
    assert not stream.feed(b'\ndata: {"more"') and read == [{"rows": "A" * 1000}] and stream.begun
    assert not stream.feed(b": 1}") and stream.begun
    assert stream.feed(b"\n\ndata: [DONE]\n") and read[1:] == [{"more": 1}]
