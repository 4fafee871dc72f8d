"""Connections that keep the server waiting end, others do not, and there are only so many; the clock is the test's."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest
from starlette.types import Receive, Scope, Send

from proxy.api.connections import LINE, ClientLine
from proxy.serving import connections
from proxy.serving.connection import MOST_HEADER_BYTES, MOST_HEADERS, MOST_WAITING_REQUESTS, Connection, Stage
from proxy.serving.connections import LEAST_BODY_BYTES, SPARE
from proxy.serving.server import Server, new_server
from proxy.settings import Settings
from tests.support import until
from tests.wide import CROSSED

GET = b"GET /any HTTP/1.1\r\nhost: t\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: t\r\n\r\n"
HALF_A_HEAD = b"POST /any HTTP/1.1\r\nhost: t\r\nx-half: "
UPLOAD = b"POST /any HTTP/1.1\r\nhost: t\r\ncontent-length: 1000000\r\n\r\n"


class App:
    """An ASGI application that reads the body, waits until `answering`, and answers; or streams as `stream` says."""

    def __init__(self) -> None:
        self.answering, self.reading = asyncio.Event(), asyncio.Event()
        self.answering.set()
        self.reading.set()
        self.asked = self.left = self.sent = 0
        self.stream = False
        self.lines: list[ClientLine] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked += 1
        self.lines.append(scope[LINE])
        await self.reading.wait()
        more = True
        while more:
            message = await receive()
            more = message.get("more_body", False)
            if message["type"] == "http.disconnect":
                self.left += 1
                return
        gone = asyncio.ensure_future(receive())
        answer = asyncio.ensure_future(self._answer(send))
        await asyncio.wait((gone, answer), return_when=asyncio.FIRST_COMPLETED)
        self.left += not answer.done()
        answer.cancel()
        gone.cancel()

    async def _answer(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while self.stream:
            await send({"type": "http.response.body", "body": bytes(1000), "more_body": True})
            self.sent += 1000
            await asyncio.sleep(0)
        await self.answering.wait()
        await send({"type": "http.response.body", "body": b"whole"})


class Clients:
    """A server of `app`, and connections to it. `now`: what its clock shows."""

    def __init__(self, server: Server, app: App, port: int) -> None:
        self.server, self.app, self._port = server, app, port
        self.now = asyncio.get_running_loop().time()
        self._writers: list[asyncio.StreamWriter] = []

    @property
    def open(self) -> list[Connection]:
        return [each for each in self.server.connections.connections if not each.transport.is_closing()]

    async def connect(
        self, *sent: bytes, stage: Stage | None = None
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A new connection that has sent `sent`, once the server has read it: then it is at `stage`, if given."""
        before = set(self.server.connections.connections)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers.append(writer)
        for part in sent:
            writer.write(part)
        if stage is not None:
            await until(lambda: any(each.look() is stage for each in self.server.connections.connections - before))
        return reader, writer

    def sweep(self, after_s: float) -> None:
        """Let `after_s` seconds pass, then let the server look at its connections."""
        self.now += after_s
        self.server.connections.sweep(self.now)

    async def close(self) -> None:
        for writer in self._writers:
            writer.close()


@pytest.fixture
async def clients(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Clients]:
    monkeypatch.setattr(connections, "SWEEP_S", 3600.0)  # the test says when
    app = App()
    server = new_server(app, Settings(engine="scripted"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        clients = Clients(server, app, listener.getsockname()[1])
        try:
            yield clients
        finally:
            await clients.close()
            app.stream = False
            app.answering.set()
            app.reading.set()
            server.ask_to_exit()
            await serving


async def test_a_connection_that_sends_nothing_is_closed_after_ten_seconds_and_not_before(clients: Clients) -> None:
    reader, _ = await clients.connect(stage=Stage.FRESH)
    clients.sweep(9)
    assert len(clients.open) == 1
    clients.sweep(2)
    assert await reader.read() == b""


async def test_half_a_head_gets_408_after_ten_seconds_however_often_a_byte_comes(clients: Clients) -> None:
    reader, writer = await clients.connect(HALF_A_HEAD, stage=Stage.HEAD)
    [connection] = clients.open
    for _ in range(5):
        clients.sweep(2)
        before = connection._unframed
        writer.write(b"a")
        await until(lambda before=before: connection._unframed > before)  # type: ignore[misc]
    assert len(clients.open) == 1
    clients.sweep(2.1)
    answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"request_timeout"' in answer
    assert clients.app.asked == 0


async def test_the_head_of_a_later_request_has_ten_seconds_from_its_first_byte(clients: Clients) -> None:
    reader, writer = await clients.connect(GET, stage=Stage.IDLE)
    clients.sweep(0)
    clients.sweep(60)
    writer.write(HALF_A_HEAD)
    await until(lambda: clients.open[0].look() is Stage.HEAD)
    clients.sweep(0)
    clients.sweep(9)
    assert len(clients.open) == 1
    clients.sweep(2)
    assert b"HTTP/1.1 408 " in await reader.read()


async def test_a_connection_is_idle_for_75_seconds_even_if_line_ends_come(clients: Clients) -> None:
    reader, writer = await clients.connect(GET, stage=Stage.IDLE)
    clients.sweep(0)
    writer.write(b"\r\n")  # after which uvicorn has no timeout
    await until(lambda: clients.open[0]._unframed == 2)
    clients.sweep(74)
    assert len(clients.open) == 1
    clients.sweep(2)
    assert (await reader.read()).endswith(b"0\r\n\r\n")


async def test_a_body_may_take_long_while_it_comes_and_gets_408_when_it_stops(clients: Clients) -> None:
    reader, writer = await clients.connect(UPLOAD, stage=Stage.BODY)
    [connection] = clients.open
    clients.sweep(0)
    for part in range(1, 6):
        clients.sweep(9)
        writer.write(bytes(LEAST_BODY_BYTES))
        await until(lambda part=part: connection.received == part * LEAST_BODY_BYTES)  # type: ignore[misc]
    clients.sweep(9)
    assert clients.open
    clients.sweep(9)
    writer.write(b"1")  # this is no progress
    await until(lambda: connection.received == 5 * LEAST_BODY_BYTES + 1)
    clients.sweep(2)
    assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
    await until(lambda: clients.app.left == 1)


async def test_a_body_that_the_server_does_not_read_yet_is_not_late(clients: Clients) -> None:
    clients.app.reading.clear()
    _, _writer = await clients.connect(UPLOAD, bytes(200_000), stage=Stage.BODY)
    expecting = UPLOAD.replace(b"host", b"expect: 100-continue\r\nhost")
    await clients.connect(expecting, stage=Stage.BODY)
    await until(lambda: any(each.flow.read_paused for each in clients.open))
    for _ in range(4):
        clients.sweep(9)
    assert len(clients.open) == 2


async def test_a_client_that_reads_nothing_is_left_after_two_minutes_and_holds_little(clients: Clients) -> None:
    clients.app.stream = True
    _, _writer = await clients.connect(GET, stage=Stage.UNREAD)
    await until(lambda: clients.open[0].flow.write_paused)
    sent = clients.app.sent
    clients.sweep(0)
    clients.sweep(119)
    assert len(clients.open) == 1
    assert clients.app.sent == sent and clients.open[0].transport.get_write_buffer_size() < 100_000
    clients.sweep(2)
    await until(lambda: clients.app.left == 1)
    assert not clients.open


async def test_a_client_that_reads_slowly_gets_its_stream(clients: Clients) -> None:
    clients.app.stream = True
    reader, _writer = await clients.connect(GET, stage=Stage.UNREAD)
    await until(lambda: clients.open[0].flow.write_paused)
    for _ in range(3):
        clients.sweep(0)
        before = clients.app.sent
        clients.sweep(100)
        while clients.app.sent == before:
            await reader.read(100_000)
        await until(lambda: clients.open[0].flow.write_paused)
    assert len(clients.open) == 1


@pytest.mark.parametrize("early", [True, False])
async def test_a_client_that_shuts_down_its_sending_side_gets_its_whole_answer(clients: Clients, early: bool) -> None:
    clients.app.answering.clear()
    reader, writer = await clients.connect(GET, stage=None if early else Stage.REPLY)
    writer.write_eof()
    await until(lambda: bool(clients.open) and clients.open[0].half_closed)
    clients.sweep(0)
    clients.sweep(300)
    clients.app.answering.set()
    assert b"whole" in await reader.read()
    assert clients.app.left == 0


async def test_a_client_that_leaves_is_noticed_whether_or_not_it_shut_down_its_sending_side_first(
    clients: Clients,
) -> None:
    clients.app.answering.clear()
    _, leaves = await clients.connect(GET, stage=Stage.REPLY)
    leaves.close()
    _, half = await clients.connect(GET, stage=Stage.REPLY)
    half.write_eof()
    await until(lambda: any(each.half_closed for each in clients.open))

    def noticed(count: int) -> bool:
        clients.sweep(1)
        return clients.app.left == count

    await until(lambda: noticed(1))
    half.close()
    await until(lambda: noticed(2))
    assert not clients.open


async def test_an_end_of_data_within_a_request_ends_the_connection(clients: Clients) -> None:
    for half, stage in ((b"", Stage.FRESH), (HALF_A_HEAD, Stage.HEAD), (UPLOAD, Stage.BODY)):
        reader, writer = await clients.connect(half, stage=stage)
        writer.write_eof()
        assert await reader.read() == b""
    assert clients.app.left == 1


async def test_silent_connections_make_room_the_oldest_first_and_idle_ones_after_them(clients: Clients) -> None:
    clients.server.connections.most = 4
    idle, _ = await clients.connect(GET, stage=Stage.IDLE)
    silent = [(await clients.connect(stage=Stage.FRESH))[0] for _ in range(3)]
    for at, reader in enumerate([*silent, idle]):
        clients.app.answering.clear()
        await clients.connect(GET, stage=Stage.REPLY)
        assert (await reader.read() == b"") is (at < len(silent))
    assert clients.app.asked == 5 and len(clients.open) == 4


async def test_with_all_connections_in_use_only_health_answers_and_others_get_503(
    clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    clients.server.connections.most = 2
    clients.app.answering.clear()
    running = [(await clients.connect(GET, stage=Stage.REPLY))[0] for _ in range(2)]
    late, _ = await clients.connect(GET)
    answer = await late.read()
    assert answer.startswith(b"HTTP/1.1 503 ") and b"\r\nretry-after: 1\r\n" in answer
    assert "all connections are in use" in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]
    watching = [(await clients.connect(HEALTH, stage=Stage.REPLY))[0] for _ in range(SPARE)]
    refused, _ = await clients.connect()
    assert (await refused.read()).startswith(b"HTTP/1.1 503 ")
    assert clients.app.asked == 2 + SPARE
    clients.app.answering.set()
    for reader in (*running, *watching):
        assert b"whole" in await reader.readuntil(b"whole")
    with caplog.at_level(logging.WARNING):
        clients.sweep(1)
    assert caplog.messages == [f"connections closed: 1 refused, with all others in use; {2 + SPARE} are open"]


async def test_uploads_and_replies_that_stand_still_make_room(clients: Clients) -> None:
    clients.server.connections.most = 2
    clients.app.stream = True
    await clients.connect(GET, stage=Stage.UNREAD)
    upload, _ = await clients.connect(UPLOAD, stage=Stage.BODY)
    clients.app.stream = False
    clients.app.answering.clear()
    late, _ = await clients.connect(GET)
    assert (await late.read()).startswith(b"HTTP/1.1 503 ")
    for stands_still_s, stages in ((2, {Stage.UNREAD, Stage.REPLY}), (10, {Stage.REPLY})):
        clients.sweep(0)
        for connection in clients.open:
            connection.since -= stands_still_s
        await clients.connect(GET, stage=Stage.REPLY)
        assert {each.look() for each in clients.open} == stages and len(clients.open) == 2
    assert await upload.read() == b""


@pytest.mark.parametrize(
    "head",
    [HALF_A_HEAD, b"POST /any HTTP/1.1\r\nhost: t\r\ntransfer-encoding: chunked\r\n\r\n1\r\n1\r\n0\r\nx-trailer: "],
)
async def test_headers_and_trailers_end_at_64_kib(clients: Clients, head: bytes) -> None:
    reader, writer = await clients.connect(head)
    await until(lambda: clients.open[0].scope is not None)
    writer.write(b"a" * (MOST_HEADER_BYTES + 1))
    assert b"HTTP/1.1 431 " in await reader.read()


MANY_HEADERS = b"a:b\r\n" * (MOST_HEADERS + 2)  # the parser tells of a header as the next one begins


@pytest.mark.parametrize(
    "request_",
    [
        b"GET /any HTTP/1.1\r\n" + MANY_HEADERS,
        b"GET /any HTTP/1.1\r\n" + MANY_HEADERS + b"\r\n",
        b"GET /any HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\n" + MANY_HEADERS + b"\r\n",
        b"POST /any HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\n1\r\n0\r\n" + MANY_HEADERS,
    ],
    ids=["half a head", "a head", "an offer", "trailers"],
)
async def test_a_request_has_at_most_so_many_headers(clients: Clients, request_: bytes) -> None:
    reader, _ = await clients.connect(request_)
    assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    assert clients.app.asked <= 1
    assert not clients.open


async def test_requests_before_one_of_too_many_headers_are_answered(clients: Clients) -> None:
    reader, _ = await clients.connect(GET * 2 + b"GET /any HTTP/1.1\r\n" + MANY_HEADERS + b"\r\n")
    assert (await reader.read()).count(b"HTTP/1.1 200 ") == 2 == clients.app.asked


OFFER = (
    b"POST /any HTTP/1.1\r\nhost: t\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n"
    b"http2-settings: AAEAAEAA\r\ncontent-length: 6\r\n\r\nabcdef"
)
"""As Java's HTTP client offers HTTP/2 with its first request."""


@pytest.mark.parametrize(("cut", "stage"), [(len(OFFER), None), (40, Stage.HEAD), (len(OFFER) - 4, Stage.BODY)])
async def test_a_request_that_offers_another_protocol_is_read_whole(
    clients: Clients, cut: int, stage: Stage | None
) -> None:
    reader, writer = await clients.connect(OFFER[:cut], stage=stage)
    writer.write(OFFER[cut:])
    for request in (OFFER, GET, OFFER):  # the connection goes on
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"whole" in await reader.readuntil(b"0\r\n\r\n")
        writer.write(request)
    [connection] = clients.open
    await until(lambda: connection.received == 3 * 6)


SMALL_OFFER = b"GET /any HTTP/1.1\r\nhost: t\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"


async def test_hundreds_of_offers_in_a_row_fail_nothing(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reader, _ = await clients.connect(SMALL_OFFER * 3000)
        answers = await reader.read()
        clients.sweep(0)
    assert 1 <= answers.count(b"HTTP/1.1 200 ") == clients.app.asked <= MOST_WAITING_REQUESTS + 1
    assert caplog.messages == ["connections closed: 1 sent too many requests ahead of their replies; 0 are open"]


@pytest.mark.parametrize("request_", [GET, SMALL_OFFER], ids=["plain", "offer"])
async def test_requests_that_wait_for_earlier_replies_are_so_many_and_each_is_answered(
    clients: Clients, request_: bytes
) -> None:
    clients.app.answering.clear()
    reader, _ = await clients.connect(request_ * 100_000, stage=Stage.REPLY)
    [connection] = clients.open
    await until(lambda: connection._is_full)
    assert len(connection.pipeline) == MOST_WAITING_REQUESTS
    clients.app.answering.set()
    answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 ") == clients.app.asked == MOST_WAITING_REQUESTS + 1
    assert answers.count(b"connection: close") == 1


@pytest.mark.wide
async def test_the_replies_of_one_connection_come_whole_if_nobody_sends_ahead_of_them(clients: Clients) -> None:
    reader, writer = await clients.connect()
    for _ in range(2 * MOST_WAITING_REQUESTS):
        writer.write(SMALL_OFFER)
        assert b"whole" in await reader.readuntil(b"0\r\n\r\n")
    assert len(clients.open) == 1


async def test_a_fault_in_reading_ends_the_connection_and_is_logged_with_one_traceback(
    clients: Clients, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Connection, rest: bytes) -> bytes:
        raise RecursionError

    monkeypatch.setattr(Connection, "_declined", fail)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            reader, _ = await clients.connect(SMALL_OFFER)
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        clients.sweep(0)
    assert len([record for record in caplog.records if record.exc_info]) == 1
    assert caplog.messages[-1] == "connections closed: 3 the data of a connection was not read; 0 are open"


async def test_what_is_not_http_gets_400_and_is_counted(clients: Clients, caplog: pytest.LogCaptureFixture) -> None:
    for sent in (b"\x16\x03\x01\x02", b"GET /\xff HTTP/1.1\r\n\r\n", b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\n\r\n"):
        reader, _ = await clients.connect(sent)
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"invalid_request"' in answer
    with caplog.at_level(logging.WARNING):
        clients.sweep(0)
    assert caplog.messages == ["connections closed: 3 sent what is not HTTP; 0 are open"]


async def test_replies_that_are_not_read_end_soon_once_the_server_is_stopping(clients: Clients) -> None:
    clients.app.stream = True
    await clients.connect(GET, stage=Stage.UNREAD)
    await until(lambda: clients.open[0].flow.write_paused)
    clients.server.ask_to_exit()
    await until(lambda: clients.server.connections._ending)
    clients.sweep(0)
    clients.sweep(4)
    assert len(clients.open) == 1
    clients.sweep(2)
    await until(lambda: clients.app.left == 1)


@CROSSED
@pytest.mark.parametrize(
    "behind", [b"\x16\x03\x01", b"GET /\xff HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nx: " + bytes(80_000)]
)
@pytest.mark.parametrize("number", [1, 3])
async def test_what_is_not_http_behind_requests_leaves_their_replies_whole(
    clients: Clients, number: int, behind: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    clients.app.answering.clear()
    reader, writer = await clients.connect(GET * number, stage=Stage.REPLY)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")  # the first reply has begun
    writer.write(behind)
    await writer.drain()
    [connection] = clients.open
    if number == 1:
        await until(lambda: connection._is_full)
    clients.app.answering.set()
    answers = await reader.read()
    assert answers.count(b"HTTP/1.1 200 ") == number - 1 and answers.count(b"whole") == number
    assert b"HTTP/1.1 4" not in answers
    assert clients.app.asked == number


async def test_a_client_that_leaves_with_requests_behind_its_reply_is_noticed(clients: Clients) -> None:
    clients.app.stream = True
    reader, writer = await clients.connect(GET * 3)
    await reader.readuntil(b"\r\n\r\n")
    [connection] = clients.open
    await until(lambda: len(connection.pipeline) == 2)
    writer.transport.abort()
    await until(lambda: clients.app.left == 1)
    assert clients.app.asked == 1 and clients.app.lines[0].left


async def test_a_line_tells_once_that_its_client_left_even_if_nobody_receives(clients: Clients) -> None:
    clients.app.reading.clear()
    told: list[int] = []
    body = bytes(100_000)  # more than uvicorn reads ahead of the application
    _, writer = await clients.connect(
        b"POST /any HTTP/1.1\r\nhost: t\r\ncontent-length: 100000\r\n\r\n", stage=Stage.BODY
    )
    writer.write(body[:50_000])
    await until(lambda: clients.open[0].received == 50_000)
    writer.write(body[50_000:])
    await until(lambda: clients.open[0].look() is Stage.REPLY)
    [line] = clients.app.lines
    line.watchers.append(lambda: told.append(1))
    assert not line.left
    writer.transport.abort()
    await until(lambda: told == [1])
    assert line.left and clients.app.left == 0


async def test_each_request_of_a_connection_has_a_line_of_its_own(clients: Clients) -> None:
    reader, writer = await clients.connect(GET)
    await reader.readuntil(b"whole")
    clients.app.answering.clear()
    writer.write(GET)
    await until(lambda: clients.app.asked == 2)
    writer.transport.abort()
    await until(lambda: clients.app.left == 1)
    assert [line.left for line in clients.app.lines] == [False, True]


async def test_many_closed_connections_are_one_line_in_the_log(
    clients: Clients, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(20):
        await clients.connect(stage=Stage.FRESH)
    for _ in range(3):
        await clients.connect(HALF_A_HEAD, stage=Stage.HEAD)
    with caplog.at_level(logging.WARNING):
        clients.sweep(0)
        clients.sweep(11)
        clients.sweep(11)
    assert caplog.messages == [
        "connections closed: 20 sent no request within 10 s, 3 sent half of a request's head within 10 s; 0 are open"
    ]


async def test_the_end_closes_what_waits_for_its_client_and_lets_replies_finish(clients: Clients) -> None:
    clients.app.answering.clear()
    silent, half, one, upload, another = [
        (await clients.connect(sent, stage=stage))[0]
        for sent, stage in (
            (b"", Stage.FRESH),
            (HALF_A_HEAD, Stage.HEAD),
            (GET, Stage.REPLY),
            (UPLOAD, Stage.BODY),
            (GET, Stage.REPLY),
        )
    ]
    clients.server.ask_to_exit()
    assert (await silent.read(), await half.read()) == (b"", b"")
    answer = await upload.read()
    assert answer.startswith(b"HTTP/1.1 503 ") and b"shutting down" in answer
    clients.app.answering.set()
    assert b"whole" in await one.read() and b"whole" in await another.read()
