"""HTTP clients for agents, and their transports to an application in this process.

The transports support httpx and httpx2, which have the same interface but separate classes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal, get_args

import httpx

from tokengrove.client.asgi import BrokenOff, Exchange, Message, TimedOut
from tokengrove.client.certificates import trusted
from tokengrove.client.libraries import library as import_library
from tokengrove.client.running_app import AppHold, AppStopped, RunningApp
from tokengrove.errors import InvalidRequest

Library = Literal["httpx", "httpx2"]

IN_PROCESS = "http://in-process.tokengrove.invalid"
"""The address of an application in this process. No network resolves it, because `.invalid` is reserved."""

AGENT_TIMEOUT_S = 3600.0
"""Seconds that an agent waits for the next part of an answer: a turn may wait for new weights or an engine server."""

_CONNECT_S = 60.0
_IDLE_CONNECTIONS = 1000
_IDLE_S = 60.0
"""Below the 75 s after which the server closes an idle connection."""


def async_http_client(hold: AppHold | None, library: Library, timeout_s: float) -> Any:
    """An `AsyncClient` of `library` that can also reach the application of `hold`, at `IN_PROCESS`."""
    found = _import(library)
    mounts = None if hold is None else {IN_PROCESS: AsyncTransport(hold, library)}
    return found.AsyncClient(**_options(found, timeout_s), mounts=mounts)


def http_client(hold: AppHold | None, library: Library, timeout_s: float) -> Any:
    """A `Client` of `library` that can also reach the application of `hold`, at `IN_PROCESS`."""
    found = _import(library)
    mounts = None if hold is None else {IN_PROCESS: Transport(hold, library)}
    return found.Client(**_options(found, timeout_s), mounts=mounts)


class AsyncTransport(httpx.AsyncBaseTransport):
    """A transport for an `AsyncClient`. It may be used on any event loop."""

    def __init__(self, hold: AppHold, library: Library = "httpx") -> None:
        self._hold, self._library = hold, _import(library)
        self._opened: set[Exchange] = set()

    async def handle_async_request(self, request: Any) -> Any:
        body, timeout_s = await request.aread(), _read_timeout(request)
        with _errors_of(self._library, request):
            running = await self._hold.ready()
            steps = running.answer(_scope(request), body, timeout_s, self._opened)
            exchange, status, headers = await running.run(steps)
        parts = _stream_class(self._library.AsyncByteStream, _AsyncParts)(
            running, exchange, timeout_s, self._library, request
        )
        return self._library.Response(status, headers=headers, stream=parts, extensions=_EXTENSIONS)

    async def aclose(self) -> None:
        """Disconnect from the answers that are not at their end."""
        _leave_all(self._opened)


class Transport(httpx.BaseTransport):
    """A transport for a blocking `Client`. It may be used in several threads."""

    def __init__(self, hold: AppHold, library: Library = "httpx") -> None:
        self._hold, self._library = hold, _import(library)
        self._opened: set[Exchange] = set()

    def handle_request(self, request: Any) -> Any:
        body, timeout_s = request.read(), _read_timeout(request)
        with _errors_of(self._library, request):
            running = self._hold.wait_ready()
            exchange, status, headers = running.wait(running.answer(_scope(request), body, timeout_s, self._opened))
        parts = _stream_class(self._library.SyncByteStream, _Parts)(
            running, exchange, timeout_s, self._library, request
        )
        return self._library.Response(status, headers=headers, stream=parts, extensions=_EXTENSIONS)

    def close(self) -> None:
        """Disconnect from the answers that are not at their end."""
        _leave_all(self._opened)


class _Answer:
    """The body of an answer. Dropping it before its end disconnects."""

    def __init__(
        self, running: RunningApp, exchange: Exchange, timeout_s: float | None, library: Any, request: Any
    ) -> None:
        self._running, self._exchange, self._timeout_s = running, exchange, timeout_s
        self._library, self._request = library, request

    def _leave(self) -> None:
        if not self._exchange.complete:
            self._exchange.leave_soon()

    def __del__(self) -> None:
        self._leave()


class _AsyncParts(_Answer):
    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange = self._exchange
        with _errors_of(self._library, self._request):
            while not exchange.read_whole:
                yield exchange.take() if exchange.complete else await self._running.run(exchange.read(self._timeout_s))

    async def aclose(self) -> None:
        self._leave()


class _Parts(_Answer):
    def __iter__(self) -> Iterator[bytes]:
        exchange = self._exchange
        with _errors_of(self._library, self._request):
            while not exchange.read_whole:
                yield exchange.take() if exchange.complete else self._running.wait(exchange.read(self._timeout_s))

    def close(self) -> None:
        self._leave()


_EXTENSIONS = {"http_version": b"HTTP/1.1"}


def _leave_all(opened: set[Exchange]) -> None:
    for exchange in list(opened):
        exchange.leave_soon()


def _scope(request: Any) -> Message:
    """The ASGI scope of a request. An extension tells the server that the client is in the same process."""
    url = request.url
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": url.scheme,
        "path": url.path,
        "raw_path": url.raw_path.partition(b"?")[0],
        "query_string": url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": (url.host, url.port),
        "client": None,
        "extensions": {"tokengrove.in_process": {}},
    }


def _read_timeout(request: Any) -> float | None:
    timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
    return timeout_s


@contextmanager
def _errors_of(library: Any, request: Any) -> Iterator[None]:
    """Convert errors of the application to the library's errors for a server over a network."""
    try:
        yield
    except TimedOut as error:
        raise library.ReadTimeout(str(error), request=request) from None
    except BrokenOff as error:
        raise library.RemoteProtocolError(str(error), request=request) from None
    except AppStopped as error:
        raise library.ConnectError(str(error), request=request) from None


def _options(library: Any, timeout_s: float) -> dict[str, Any]:
    limits = library.Limits(max_connections=None, max_keepalive_connections=_IDLE_CONNECTIONS, keepalive_expiry=_IDLE_S)
    timeout = library.Timeout(timeout_s, connect=_CONNECT_S, pool=None)
    return {"limits": limits, "timeout": timeout, "follow_redirects": True, "verify": trusted(library)}


@cache
def _stream_class(base: type, parts: type) -> Any:
    """`parts` as a subclass of the library's stream class, which the library's client requires of a body."""
    return type(parts.__name__, (parts, base), {})


def _import(name: str) -> Any:
    """Import httpx or httpx2. Raises InvalidRequest for another library, or if it is not installed."""
    if name not in get_args(Library):
        raise InvalidRequest(f"library has to be httpx or httpx2, not {name!r}", param="library")
    return import_library(name)
