"""Client connections: detects that the client has left, and stops its work."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

_T = TypeVar("_T")


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
    """Wait until `end` is done. Return False if the client leaves first.

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
