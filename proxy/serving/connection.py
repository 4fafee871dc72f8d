"""One client's HTTP/1.1 connection: uvicorn's protocol, extended by the stage that the connection is in.

A client that has shut down only its sending side still gets its answer: the end of its data does not end a request that
has arrived completely. The system is asked whether the client has disconnected (`peer`).
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import MutableMapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol

import httptools
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proxy.api.connections import LINE, ClientLine
from proxy.api.http import error_response
from proxy.resources.senders import Sender, host_of
from proxy.serving import peer
from proxy.telemetry.http_request import HttpRequest, RequestEnd, found_in
from tokengrove.errors import HeadersTooLarge, InvalidRequest, ProxyError

if TYPE_CHECKING:
    from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

MOST_HEADER_BYTES = 64 * 1024
"""The maximum number of bytes in a row without the end of a head or a part of a body. The parser keeps all of them."""

MOST_HEADERS = 256
"""The maximum number of headers and trailers of one request. Each takes more memory than its bytes."""

MOST_WAITING_REQUESTS = 64
"""The maximum number of pipelined requests of one connection that wait for earlier replies. Later data is not read."""


class Stage(Enum):
    """What a connection waits for. The values describe a late client in log lines and errors."""

    FRESH = "sent no request"
    HEAD = "sent half of a request's head"
    BODY = "sent half of a request's body"
    REPLY = "waits for its reply"
    UNREAD = "did not read its reply"
    IDLE = "sent no further request"


class Host(Protocol):
    """The server of a connection, as the connection sees it. `on_end`: called with the record of each ended request."""

    on_end: RequestEnd | None

    def admit(self, connection: Connection) -> None:
        """Accept, limit or refuse a new connection, which is already in the server's set of connections."""

    def leave(self, connection: Connection) -> None:
        """Forget a connection that was lost."""

    def note(self, what: str) -> None:
        """Count a connection that the server closes, for the log."""

    def note_failure(self, what: str) -> None:
        """The same as `note`, for a fault of the server: the exception that is being handled."""


class _FullError(Exception):
    """Stops the parser."""


class Connection(HttpToolsProtocol):
    """A connection. `received`: the bytes of bodies so far.

    `stage`, `mark` (which changes with progress within the stage) and `since` (the time of their last change, in
    seconds of the event loop's clock) are managed by the watcher of connections. `sender`: the host of its client.
    """

    app: ASGIApp
    cycle: RequestResponseCycle | None  # type: ignore[assignment]  # uvicorn says that there always is one
    stage: Stage
    sender: Sender
    mark: object
    since: float

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.half_closed = False
        self.received = 0
        self._unframed = 0
        self._is_full = False
        self._running: RequestResponseCycle | None = None  # the request being answered; `cycle` is the newest request
        self._line: ClientLine | None = None  # that of the request being answered

    @property
    def host(self) -> Host:
        """The connections of the server."""
        host: Any = self.server_state
        return host  # type: ignore[no-any-return]

    @property
    def socket(self) -> socket.socket:
        """The socket, only for socket options."""
        return self.transport.get_extra_info("socket")  # type: ignore[no-any-return]

    @property
    def local_port(self) -> int | None:
        """The server's port that the client connected to; None for a Unix socket."""
        return None if self.server is None else self.server[1]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.stage, self.mark, self.since = Stage.FRESH, None, self.loop.time()
        self.sender = Sender(host_of(self.client[0]) if self.client else "")
        self.host.admit(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # it notifies only the newest request
        if (cycle := self._running) is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
            if self._line is not None:
                self._line.leave()
        self.host.leave(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        scope: MutableMapping[str, Any] = cycle.scope  # type: ignore[assignment]
        scope[LINE] = self._line = ClientLine(self.transport, self.flow)
        super()._start_asgi_task(cycle, app)

    def data_received(self, data: bytes) -> None:
        if self._is_full:
            return
        cycle = self.cycle
        self._unframed += len(data)
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except Exception:  # otherwise asyncio would log a traceback for each connection
            self.host.note_failure("the data of a connection was not read")
            self.transport.abort()
            return
        if self._is_full or self.transport.is_closing():
            return
        running = self._running
        if self.flow.read_paused and running is self.cycle and running is not None and not running.more_body:
            self.flow.resume_reading()  # the request has arrived whole, and only its client's departure can follow
        if self.headers is not None and len(self.headers) > MOST_HEADERS:
            self._refuse_headers(f"there are more than {MOST_HEADERS} headers; send fewer")
        elif self.cycle is not cycle:
            self._unframed = 0
        elif self._unframed > MOST_HEADER_BYTES:
            self._refuse_headers(f"the headers are longer than {MOST_HEADER_BYTES} bytes; send fewer or shorter ones")

    def _feed(self, data: bytes) -> None:
        """Feed `data` to the parser, which stops at each head that offers another protocol."""
        unread: bytes | None = data
        while unread is not None:
            try:
                self.parser.feed_data(unread)
                return
            except httptools.HttpParserUpgrade as offer:
                unread = self._declined(unread[offer.args[0] :])
            except httptools.HttpParserError:
                if not self._is_full:
                    self.send_400_response("")
                return

    def on_headers_complete(self) -> None:
        """Begin a request, unless it has too many headers, or too many requests wait. An error stops the parser."""
        if len(self.headers) > MOST_HEADERS:
            self._refuse_headers(f"there are more than {MOST_HEADERS} headers; send fewer")
            raise _FullError
        if len(self.pipeline) >= MOST_WAITING_REQUESTS:
            self.host.note("sent too many requests ahead of their replies")
            self._read_no_more(self.pipeline[0][0])
            raise _FullError
        super().on_headers_complete()

    def _refuse_headers(self, message: str) -> None:
        self.host.note("sent headers that are too long")
        self._refuse_next(HeadersTooLarge(message))
        self._is_full = True

    def _read_no_more(self, newest: RequestResponseCycle) -> None:
        """Answer the requests up to `newest`, then close."""
        self._is_full = True
        newest.keep_alive = False
        self.cycle, self.scope = newest, newest.scope

    def _should_upgrade(self) -> bool:
        """True: begin no request with a head that offers another protocol. `_declined` has it parsed again."""
        return True

    def _declined(self, rest: bytes) -> bytes | None:
        """The data to parse instead of a request that offers another protocol: the same request without the offer.

        `rest`: the data after its head, which the parser took for data of the other protocol. Java's HTTP client offers
        HTTP/2 with every first request. Returns None if the request is refused.
        """
        method = self.parser.get_method()
        if method == b"CONNECT":
            self.send_400_response("")
            return None
        headers = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return b"%s %s HTTP/1.1\r\n%s\r\n%s" % (method, self.url, b"".join(headers), rest)

    def send_400_response(self, msg: str) -> None:
        """Refuse data that the parser cannot read."""
        self.host.note("sent what is not HTTP")
        error = InvalidRequest("this is not a valid HTTP/1.1 request; the server speaks plain HTTP, without TLS")
        self._refuse_next(error)

    def on_body(self, body: bytes) -> None:
        self.received += len(body)
        self._unframed = 0
        super().on_body(body)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Return True if the connection stays open to answer a request that has arrived completely."""
        if not peer.KNOWN or self.look() not in (Stage.REPLY, Stage.UNREAD):
            return False
        sock, cycle = self.socket, self.cycle
        if sock.family == socket.AF_UNIX or cycle is None or peer.has_left(sock):
            return False
        cycle.keep_alive = False
        self.half_closed = True
        peer.ask_often(sock)
        return True

    def look(self) -> Stage:
        """The current stage of the connection."""
        cycle, pipeline = self.cycle, self.pipeline
        if self.transport.get_write_buffer_size():
            return Stage.UNREAD
        if cycle is not None and not cycle.response_complete:
            return Stage.BODY if cycle.more_body and not pipeline else Stage.REPLY
        if self.scope is None:
            return Stage.FRESH
        return Stage.HEAD if cycle is None or cycle.scope is not self.scope else Stage.IDLE

    def _refuse_next(self, error: ProxyError) -> None:
        """Refuse the next request. Replies to complete requests before it are finished first; nothing follows them."""
        running = self._running
        if running is None or running.response_complete or (running is self.cycle and running.more_body):
            self.refuse(error)
        else:
            self._read_no_more(self.pipeline[0][0] if self.pipeline else running)

    def refuse(self, error: ProxyError) -> None:
        """Answer a request that has not arrived completely with `error`, and close the connection."""
        cycle = self.cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            scope = self._refused()
            request = found_in(scope) or HttpRequest(scope, self.host.on_end)
            self.transport.write(_written(scope, error))
            request.end(scope)
        self.transport.close()
        if cycle is not None:
            cycle.disconnected = True
            cycle.message_event.set()

    def _refused(self) -> MutableMapping[str, Any]:
        """The scope of the refused request, or a new scope if its head has not arrived completely."""
        known: MutableMapping[str, Any] | None = self.scope if self.scope and "path" in self.scope else None  # type: ignore[assignment]
        if known is not None and not (self.cycle is not None and self.cycle.response_complete):
            return known
        return {"method": "", "path": "/" if known is None else known["path"], "headers": []}


def _written(scope: MutableMapping[str, Any], error: ProxyError) -> bytes:
    """A complete reply that closes its connection."""
    response = error_response(scope, error)
    headers = [*response.raw_headers, (b"connection", b"close")]
    lines = [b"%s: %s\r\n" % header for header in headers]
    return b"%s%s\r\n%s" % (STATUS_LINE[response.status_code], b"".join(lines), bytes(response.body))
