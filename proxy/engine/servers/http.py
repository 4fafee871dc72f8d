"""An HTTP/1.1 client for one server, without a coroutine or queue between the socket and the reader of an answer.

All bytes of an answer that arrive in one read are passed on in one call. Connections are kept alive for later requests.
Either an answer is complete or its request raises. An answer without a length ends with its connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Mapping, Sequence
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

_CONNECT_S = 5.0
_KEPT_S = 4.0
"""Seconds for which an idle connection can be reused. Servers use uvicorn, which closes idle connections after 5 s."""

_REST_S = 4.0
"""Seconds for which the unneeded rest of an answer is read, so that its connection can be kept alive."""

_JOINED = 16_384
"""A body of at most this many bytes is joined, which is faster than sending its parts."""

_OK = 200
_FRAMES = {b"content-length", b"transfer-encoding"}
"""The header fields that determine where an answer ends. An answer without them ends with its connection."""


class Disconnected(Exception):
    """The server cannot be reached, closed the connection before its answer ended, or does not speak HTTP."""


class Unreached(Disconnected):
    """The server cannot be reached, so it has received nothing of the request."""


class Exchange:
    """A request and its answer. `status`: 0 until the answer begins. `body`: the bytes so far.

    `sent`: the time when the request was created, by the clock of the event loop.
    """

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.sent = loop.time()
        self.status = 0
        self.body = bytearray()

    def feed(self, data: bytes) -> bool:
        """Take bytes of an answer with status 200. Return True if the rest of the answer is not needed.

        Exceptions are propagated by the request. Answers with another status are collected in `body`.
        """
        self.body += data
        return False

    def fail(self, error: Exception) -> None:
        """Make the request raise `error`, unless it has ended."""
        if not self.ended.done():
            self.ended.set_exception(error)
            self.ended.exception()  # mark it as retrieved: the request may have been cancelled


def fields_of(headers: Mapping[str, str]) -> bytes:
    """Return `headers` as lines of a request's head."""
    return "".join([f"{name}: {value}\r\n" for name, value in headers.items()]).encode()


class HttpClient:
    """Sends requests to the server at `url`."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix, self._host = parts.path, parts.netloc
        self._connections: set[_Connection] = set()
        self._kept: deque[_Connection] = deque()
        self._sweeper: asyncio.TimerHandle | None = None
        self.closed = False

    def head(self, method: str, path: str, headers: Mapping[str, str]) -> bytes:
        """Return the head of a request without its length. `send` completes it; `fields_of` adds further fields."""
        return f"{method} {self._prefix}{path} HTTP/1.1\r\nhost: {self._host}\r\n".encode() + fields_of(headers)

    async def send(self, exchange: Exchange, head: bytes, body: Sequence[bytes], *, repeat: bool) -> None:
        """Send a request; return when `exchange` has ended. Raises Disconnected, or the error of `exchange`.

        `body`: the parts of the body, so that a long body need not be joined. `repeat`: the server may get the request
        twice, so an idle connection can be reused. If the server is just closing it, the request is sent again over a
        new connection.
        """
        if self.closed:
            raise Disconnected("closed")
        length = sum(map(len, body))
        message = [b"%bcontent-length: %d\r\n\r\n" % (head, length), *body]
        if length <= _JOINED:
            message = [b"".join(message)]
        kept = self._take_kept() if repeat else None
        if kept is not None:
            try:
                return await kept.carry(exchange, message)
            except Disconnected:
                if exchange.status:
                    raise
                exchange.ended = asyncio.get_running_loop().create_future()
        await (await self._connect()).carry(exchange, message)

    def close(self) -> None:
        """Close all connections permanently. Requests in flight raise Disconnected."""
        self.closed = True
        if self._sweeper is not None:
            self._sweeper.cancel()
        for connection in list(self._connections):
            connection.close()

    async def _connect(self) -> _Connection:
        connection = _Connection(self)
        host, port = self._address
        try:
            async with asyncio.timeout(_CONNECT_S):
                await asyncio.get_running_loop().create_connection(lambda: connection, host, port, ssl=self._tls)
        except (OSError, UnicodeError) as error:
            raise Unreached(type(error).__name__) from None
        return connection

    def _take_kept(self) -> _Connection | None:
        """The most recently used idle connection, or None if none can be reused."""
        oldest = asyncio.get_running_loop().time() - _KEPT_S
        while self._kept:
            connection = self._kept.pop()
            if connection.kept_since > oldest and not connection.transport.is_closing():
                return connection
            connection.close()
        return None

    def joined(self, connection: _Connection) -> None:
        """Note an established connection."""
        self._connections.add(connection)
        if self.closed:
            connection.close()

    def left(self, connection: _Connection) -> None:
        """Note a lost connection."""
        self._connections.discard(connection)

    def keep(self, connection: _Connection) -> None:
        """Keep a connection for another request."""
        loop = asyncio.get_running_loop()
        connection.kept_since = loop.time()
        self._kept.append(connection)
        if self._sweeper is None:
            self._sweeper = loop.call_later(_KEPT_S, self._sweep)

    def _sweep(self) -> None:
        """Close the connections that have been idle for too long."""
        loop = asyncio.get_running_loop()
        while self._kept and self._kept[0].kept_since + _KEPT_S <= loop.time():
            self._kept.popleft().close()
        self._sweeper = loop.call_at(self._kept[0].kept_since + _KEPT_S, self._sweep) if self._kept else None


class _Connection(asyncio.Protocol):
    """A connection that carries one exchange at a time. The parser calls the `on_*` methods."""

    transport: asyncio.Transport

    def __init__(self, client: HttpClient) -> None:
        self.kept_since = 0.0
        self._client = client
        self._pieces: list[bytes] = []
        self._fields: dict[bytes, bytes] = {}
        self.on_body, self.on_header = self._pieces.append, self._fields.__setitem__
        self._parser = HttpResponseParser(self)
        self._exchange: Exchange | None = None
        self._over = self._reusable = False

    async def carry(self, exchange: Exchange, message: Sequence[bytes]) -> None:
        """Send a request; return when its exchange has ended. Raises Disconnected, or the error of the exchange."""
        if self.transport.is_closing():  # lost since it was established
            raise Disconnected(ConnectionResetError.__name__)
        self._exchange = exchange
        self.transport.writelines(message)
        try:
            await exchange.ended
        except BaseException:
            if self._exchange is exchange:
                self.close()  # the server may still be answering
            raise

    def close(self) -> None:
        """Close the connection immediately."""
        self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._client.joined(self)

    def data_received(self, data: bytes) -> None:
        exchange = self._exchange
        if exchange is None:
            self.close()  # no request is in progress
            return
        try:
            self._parser.feed_data(data)
            if self._pieces:
                data = b"".join(self._pieces)
                self._pieces.clear()
                if exchange.status != _OK:
                    exchange.body += data
                elif not exchange.ended.done() and exchange.feed(data):
                    exchange.ended.set_result(None)
                    if not self._over:
                        asyncio.get_running_loop().call_later(_REST_S, self._give_up, exchange)
        except (HttpParserError, HttpParserUpgrade) as error:
            exchange.fail(Disconnected(type(error).__name__))
            self.close()
        except Exception as error:
            exchange.fail(error)
        if self._over:
            self._end(exchange)

    def eof_received(self) -> None:
        exchange = self._exchange
        if exchange is not None and exchange.status and _FRAMES.isdisjoint(map(bytes.lower, self._fields)):
            self._reusable = False
            self._end(exchange)

    def on_headers_complete(self) -> None:
        if self._over:
            raise HttpParserError("a second answer")
        if self._exchange is not None and self._parser.get_status_code() >= _OK:  # a lower status is informational
            self._exchange.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        if self._exchange is not None and self._exchange.status:
            self._over, self._reusable = True, self._parser.should_keep_alive()

    def _end(self, exchange: Exchange) -> None:
        self._exchange, self._over = None, False
        self._fields.clear()
        if not exchange.ended.done():
            exchange.ended.set_result(None)
        if self._reusable and not self._client.closed:
            self._client.keep(self)
        else:
            self.close()

    def _give_up(self, exchange: Exchange) -> None:
        if self._exchange is exchange:
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        del self._parser  # it refers to the connection, which is then freed without the garbage collector
        self._client.left(self)
        if self._exchange is not None:
            self._exchange.fail(Disconnected(type(error or ConnectionResetError()).__name__))
            self._exchange = None
