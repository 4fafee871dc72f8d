"""One HTTP request to an ASGI application of this process: its answer is read while the application still sends it.

An answer is never held back: its reader gets each part as soon as it is sent. What the reader has not taken is bounded,
apart from one part, because `send` waits. A reader that leaves is a client that disconnects.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import suppress
from typing import Any

Message = MutableMapping[str, Any]
ASGIApp = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
"""An ASGI 3 application, such as `tokengrove.testing.build_app` makes."""

Headers = list[tuple[bytes, bytes]]

_MOST_UNREAD = 64 * 1024
"""Bytes that may wait for their reader before `send` waits, as between uvicorn and a socket."""

logger = logging.getLogger(__name__)


class BrokenOff(Exception):
    """The application stopped before the end of its answer."""


class TimedOut(Exception):
    """The application sent nothing for as long as the reader waits."""


class Exchange:
    """A request and its answer. Everything runs on the event loop of the application; there is one reader.

    `complete`: whether the application has sent all of its answer.
    """

    def __init__(self, app: ASGIApp, scope: Message, body: bytes) -> None:
        """`scope`: that of an HTTP request; `body`: the whole of its body."""
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
        """Let the application answer. Nothing but a cancellation is raised: the reader learns of every failure."""
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
        """Wait for the status and the headers. Raises TimedOut or BrokenOff; whatever it raises, the reader leaves."""
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
        """What has come since the last call. Once the answer is `complete`, any thread may call this."""
        part = b"".join(self._unread)
        self._unread.clear()
        self._unread_bytes = 0
        self._room.set()
        return part

    @property
    def read_whole(self) -> bool:
        """Whether the answer is at its end, for the reader too."""
        return self.complete and not self._unread

    def leave(self) -> None:
        """Disconnect: the application is told so, and what it still sends is dropped. What has come can be read."""
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
            return  # as with a connection that was closed
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
        """Answer as servers do whose application has failed, if it has not begun to answer."""
        if self.status is None:
            self.status, self.headers = 500, [(b"content-type", b"text/plain; charset=utf-8")]
            self._unread.append(b"Internal Server Error")
            self.complete = True
