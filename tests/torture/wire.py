"""HTTP without sockets: exchanges with ASGI apps in process, which a client may leave at every moment."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any
from unittest import mock

import httpx
from starlette.types import ASGIApp

from tests.torture.loop import SeededLoop


class Exchange:
    """One request and its answer. `complete`: the whole answer has come."""

    def __init__(
        self,
        loop: SeededLoop,
        app: ASGIApp,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
    ) -> None:
        url = httpx.URL("http://t" + path)
        self._loop, self.app, self._body = loop, app, body
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "headers": [(b"host", b"t"), (b"content-length", b"%d" % len(body)), *headers],
            "scheme": "http",
            "path": url.path,
            "raw_path": url.raw_path.split(b"?")[0],
            "query_string": url.query,
            "server": ("t", 80),
            "client": ("127.0.0.1", 123),
            "root_path": "",
        }
        self._asked = False
        self._gone = asyncio.Event()
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.content = b""
        self.complete = False
        self.news = asyncio.Event()
        self.task = asyncio.create_task(self._run())

    def leave(self) -> None:
        """Close the connection."""
        self._gone.set()
        self.news.set()

    @property
    def body(self) -> Any:
        """The JSON of the answer."""
        return json.loads(self.content)

    async def _run(self) -> None:
        try:
            await self.app(self._scope, self._receive, self._send)
        finally:
            self._gone.set()
            self.news.set()

    async def _receive(self) -> MutableMapping[str, Any]:
        if not self._asked:
            self._asked = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: MutableMapping[str, Any]) -> None:
        if self._loop.chance(0.1):
            await asyncio.sleep(0)
        if self._gone.is_set():
            return  # as uvicorn does
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.content += message.get("body", b"")
            if not message.get("more_body", False):
                self.complete = True
                self._gone.set()
        self.news.set()


class _Stream(httpx.AsyncByteStream):
    """The body of an exchange, as it comes."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __aiter__(self) -> AsyncIterator[bytes]:
        exchange, read = self._exchange, 0
        while True:
            exchange.news.clear()
            if read < len(exchange.content):
                piece, read = exchange.content[read:], len(exchange.content)
                yield piece
            elif exchange.complete:
                return
            elif exchange.task.done():
                raise httpx.ReadError("the worker broke off")
            else:
                await exchange.news.wait()

    async def aclose(self) -> None:
        self._exchange.leave()


class Wires:
    """The Unix sockets of the workers: which app answers at which path."""

    def __init__(self, loop: SeededLoop) -> None:
        self._loop = loop
        self.apps: dict[str, ASGIApp] = {}
        self.exchanges: set[asyncio.Task[None]] = set()
        """Those that have not ended, also if nobody reads them any more."""

    def client(self, path: str) -> httpx.AsyncClient:
        """A client of the app at `path`."""
        return httpx.AsyncClient(transport=_Transport(self._loop, self, path), trust_env=False, timeout=None)

    @contextmanager
    def replaced(self) -> Iterator[None]:
        """Let httpx find the workers here."""
        with mock.patch.object(httpx, "AsyncHTTPTransport", self._transport):
            yield

    def _transport(self, *, uds: str, verify: bool) -> httpx.AsyncBaseTransport:
        return _Transport(self._loop, self, uds)


class _Transport(httpx.AsyncBaseTransport):
    def __init__(self, loop: SeededLoop, wires: Wires, path: str) -> None:
        self._loop, self._wires, self._path = loop, wires, path

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._loop.chance(0.3):
            await asyncio.sleep(self._loop.random.uniform(0.0, 0.05))
        if (app := self._wires.apps.get(self._path)) is None:
            raise httpx.ConnectError("no worker is there")
        body = await request.aread()
        own = (b"host", b"content-length")
        headers = [(name.lower(), value) for name, value in request.headers.raw if name.lower() not in own]
        exchange = Exchange(self._loop, app, request.method, request.url.raw_path.decode(), headers, body)
        self._wires.exchanges.add(exchange.task)
        exchange.task.add_done_callback(self._wires.exchanges.discard)
        try:
            while not exchange.status:
                if exchange.task.done():
                    raise httpx.ReadError("the worker broke off")
                exchange.news.clear()
                await exchange.news.wait()
        except BaseException:
            exchange.leave()
            raise
        return httpx.Response(exchange.status, headers=exchange.headers, stream=_Stream(exchange))
