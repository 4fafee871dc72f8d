"""Blocking functions beside the event loop, a thread each: as many at once as there are episodes.

asyncio's own pool has a few threads, which blocking agents would hold until nothing else gets one, and its threads keep
a program from ending. A thread cannot be stopped: after a cancellation it runs on, its result is dropped, and `left`
counts it until it has ended.
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
    """How many threads of this process run on for nobody."""
    _left.difference_update([thread for thread in _left.copy() if not thread.is_alive()])
    return len(_left)


async def in_thread(function: Callable[[], T], name: str = "tokengrove-agent") -> T:
    """Call `function` in a new thread, with the caller's context variables; return or raise what it does."""
    future: Future[Callable[[], T]] = Future()
    future.set_running_or_notify_cancel()
    context = contextvars.copy_context()

    def run() -> None:
        # Not `set_exception`: a future of asyncio takes no StopIteration.
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
    """Call `function`; return a function that returns or raises what it did."""
    try:
        result = function()
    except BaseException as error:
        return _raiser(error)
    return lambda: result


def _raiser(error: BaseException) -> Callable[[], NoReturn]:
    def fail() -> NoReturn:
        raise error

    return fail
