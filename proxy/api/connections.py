"""Client connections: detects that the client has left, and stops its work.

Any ASGI server tells this in answer to `receive`. This package's own server also offers a `ClientLine`, which needs no
task.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

_T = TypeVar("_T")

LINE = "tokengrove.line"
"""The key of the `ClientLine` of a request in its ASGI scope. Other servers and in-process clients set none."""


class Flow(Protocol):
    """What a connection says of its flow of data: `write_paused` is True while it is full."""

    write_paused: bool


class ClientLine:
    """The connection of the client of one request.

    `left`: the client has left. `watchers`: callbacks for that moment; readers add and remove their own. `flow`: tells
    whether the connection is full.
    """

    __slots__ = ("_transport", "flow", "left", "watchers")

    def __init__(self, transport: asyncio.Transport, flow: Flow) -> None:
        self._transport, self.flow = transport, flow
        self.left = False
        self.watchers: list[Callable[[], None]] = []

    def write(self, part: bytes) -> None:
        """Write a further part of a body that `send` has begun, of unknown length. Never waits: see `flow` first."""
        self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))

    def leave(self) -> None:
        """Note that the client has left."""
        self.left = True
        for tell in tuple(self.watchers):
            tell()

    async def connected_until(self, end: asyncio.Future[Any]) -> bool:
        """Wait until `end` is done. Return False if the client leaves first."""
        if self.left or end.done():
            return not self.left
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: object = None) -> None:
            if not over.done():
                over.set_result(None)

        end.add_done_callback(wake)
        self.watchers.append(wake)
        try:
            await over
        finally:
            end.remove_done_callback(wake)
            self.watchers.remove(wake)
        return not self.left


async def while_connected(receive: Receive, work: Awaitable[_T]) -> _T:
    """Return the result of `work`. If the client leaves first, cancel `work` and raise ClientDisconnect."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        gone.cancel()
        working.cancel()


async def connected_until(end: asyncio.Future[Any], receive: Receive) -> bool:
    """`ClientLine.connected_until` for a client without one.

    Waits in the caller's own task, like `asyncio.timeout`: a task for each waiting client costs three times as much.
    """
    if end.done():
        return True
    task = asyncio.current_task()
    assert task is not None
    waiting, cancels, ended = True, task.cancelling(), False

    def stop(_: asyncio.Future[Any]) -> None:
        nonlocal ended
        if waiting:  # else the client left at the same moment
            ended = task.cancel()

    end.add_done_callback(stop)
    try:
        await disconnected(receive)
    except asyncio.CancelledError:
        if not ended or task.uncancel() > cancels:  # others have also cancelled it
            raise
    finally:
        waiting = False
        end.remove_done_callback(stop)
    return ended


async def disconnected(receive: Receive) -> None:
    """Return when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
