"""Blocking functions, each in its own thread beside the event loop: as many at once as there are episodes.

asyncio's own pool has few threads, which blocking agents would occupy, and its threads keep a program from exiting. A
thread cannot be stopped: after a cancellation it continues, its result is discarded, and `left` counts it until it
ends.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import NoReturn, TypeVar

T = TypeVar("T")
_left: set[threading.Thread] = set()


def left() -> int:
    """The number of threads of this process that still run after their cancellation."""
    _left.difference_update([thread for thread in _left.copy() if not thread.is_alive()])
    return len(_left)


async def in_thread(function: Callable[[], T], name: str = "tokengrove-agent") -> T:
    """Call `function` in a new thread with the caller's context variables; return its result or raise its exception."""
    future: Future[Callable[[], T]] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        # Not `set_exception`: a future of asyncio rejects StopIteration.
        future.set_result(_outcome(lambda: context.run(function)))

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    try:
        outcome = await asyncio.wrap_future(future)
    except asyncio.CancelledError:
        _left.add(thread)
        raise
    return outcome()


def _outcome(function: Callable[[], T]) -> Callable[[], T]:
    """Call `function`; return a function that returns its result or raises its exception."""
    try:
        result = function()
    except BaseException as error:
        return _raiser(error)
    return lambda: result


def _raiser(error: BaseException) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail
