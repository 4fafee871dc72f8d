"""One HTTP request to an ASGI application in this process. The answer is read while the application is sending it.

The reader gets each part as soon as it is sent. Unread parts are bounded, except for a single large part, because
`send` waits. When the reader leaves, the application sees a client disconnect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

Message = MutableMapping[str, Any]
ASGIApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
"""An ASGI 3 application, such as `tokengrove.testing.build_app` returns."""

Headers = list[tuple[bytes, bytes]]

_MOST_UNREAD = 64 * 1024
"""Unread bytes at which `send` waits, as between uvicorn and a socket."""

logger = logging.getLogger(__name__)


class BrokenOff(Exception):
    """The application stopped before the end of its answer."""


class TimedOut(Exception):
    """The application sent nothing within the reader's timeout."""


class Exchange:
    """A request and its answer. Everything runs on the application's event loop; there is one reader.

    `complete`: whether the application has sent its whole answer.
    """

    def __init__(self, app: ASGIApp, scope: Message, body: bytes) -> None:
        """`scope`: the scope of an HTTP request; `body`: the whole body."""
        self.status: int | None = None
        self.headers: Headers = []
        self._app, self._scope = app, scope
        self._body: bytes | None = body
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self.complete = self._over = False
        self._loop = asyncio.get_running_loop()
        self._news, self._room, self._gone = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def run(self) -> None:
        """Let the application answer. It raises nothing but cancellation: failures are reported to the reader."""
        try:
            await self._app(self._scope, self._receive, self._send)
            if self.status is None and not self._gone.is_set():
                logger.error("the ASGI application returned without an answer")
                self._fail()
        except Exception:
            logger.exception("the ASGI application failed")
            self._fail()
        finally:
            self._over = True
            self._gone.set()
            self._news.set()

    async def head(self, timeout_s: float | None) -> tuple[int, Headers]:
        """Wait for the status and the headers. Raises TimedOut or BrokenOff; after any exception, the reader leaves."""
        try:
            if self.status is None:
                await self._wait(timeout_s, lambda: self.status is not None)
            if self.status is None:
                raise BrokenOff("the application has ended before it answered")
        except BaseException:
            self.leave()
            raise
        return self.status, self.headers

    async def read(self, timeout_s: float | None) -> bytes:
        """Wait for more of the answer and return it. Raises as `head` does."""
        try:
            if not self._unread:
                await self._wait(timeout_s, lambda: bool(self._unread) or self.complete)
            if not self._unread and not self.complete:
                raise BrokenOff("the application has ended before the end of its answer")
        except BaseException:
            self.leave()
            raise
        return self.take()

    def take(self) -> bytes:
        """Return the bytes since the last call. Once the answer is `complete`, any thread may call this."""
        part = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        self._room.set()
        return part

    @property
    def read_whole(self) -> bool:
        """Whether the answer is complete and the reader has taken all of it."""
        return self.complete and not self._unread

    def leave(self) -> None:
        """Disconnect. The application receives a disconnect, and later parts are dropped; earlier parts can be read."""
        self._gone.set()
        self._room.set()

    def leave_soon(self) -> None:
        """`leave`, from any thread."""
        with suppress(RuntimeError):  # the event loop is closed, and all requests with it
            self._loop.call_soon_threadsafe(self.leave)

    async def _wait(self, timeout_s: float | None, arrived: Callable[[], bool]) -> None:
        """Wait until something has arrived or the application is over."""
        try:
            async with asyncio.timeout(timeout_s):
                while not arrived() and not self._over:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise TimedOut(f"the application sent nothing for {timeout_s:g} s") from None

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._gone.is_set():
            return  # as on a closed connection
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.headers = list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            part = message.get("body", b"")
            if part and self._scope["method"] != "HEAD":
                self._unread.append(part)
                self._unread_bytes += len(part)
            if not message.get("more_body", False):
                self.complete = True
                self._gone.set()
        self._news.set()
        if self._unread_bytes >= _MOST_UNREAD and not self.complete:
            self._room.clear()
            await self._room.wait()

    def _fail(self) -> None:
        """Answer with status 500, as a server does after an error of its application, unless an answer has begun."""
        if self.status is None:
            self.status, self.headers = 500, [(b"content-type", b"text/plain; charset=utf-8")]
            self._unread.append(b"Internal Server Error")
            self.complete = True
