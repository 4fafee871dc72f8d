"""Retries of calls that the client does not retry itself: turns, readiness, and starts of sessions.

The client must send these calls without retries, so that no retry is retried.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tokengrove.errors import ProxyError

T = TypeVar("T")
logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


def _is_retryable(error: ProxyError) -> bool:
    return error.retryable


async def retried(
    call: Callable[[], Awaitable[T]], within_s: float, repeatable: Callable[[ProxyError], bool] = _is_retryable
) -> T:
    """Await `call()`; retry after errors that are `repeatable`, while the next attempt begins within `within_s`
    seconds.

    The pauses are the server's `retry_after_s`, or grow from a quarter of a second to five seconds. Raises the last
    error.
    """
    patience = _Patience(within_s, repeatable)
    while True:
        try:
            return await call()
        except ProxyError as error:
            wait_s = patience.wait_s(error)
        await asyncio.sleep(wait_s)


def retried_here(call: Callable[[], T], within_s: float, repeatable: Callable[[ProxyError], bool] = _is_retryable) -> T:
    """Like `retried`, for a call that blocks this thread."""
    patience = _Patience(within_s, repeatable)
    while True:
        try:
            return call()
        except ProxyError as error:
            wait_s = patience.wait_s(error)
        time.sleep(wait_s)


class _Patience:
    """The time limit and the pauses of one call's retries."""

    def __init__(self, within_s: float, repeatable: Callable[[ProxyError], bool]) -> None:
        self._until, self._repeatable = time.monotonic() + within_s, repeatable
        self._pause_s = _FIRST_PAUSE_S

    def wait_s(self, error: ProxyError) -> float:
        """Seconds until the next attempt. Raises `error`, which is being handled, if there is no further attempt."""
        wait_s = self._pause_s if error.retry_after_s is None else error.retry_after_s
        if not self._repeatable(error) or time.monotonic() + wait_s > self._until:
            raise error
        logger.warning("%s; trying again in %g s", error, wait_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return wait_s
