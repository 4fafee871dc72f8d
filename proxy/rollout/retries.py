"""Repeats a call that failed for a reason that passes: the server is busy or not there."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from proxy.errors import ProxyError

T = TypeVar("T")
logger = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


async def retried(
    call: Callable[[], Awaitable[T]],
    within_s: float,
    repeatable: Callable[[ProxyError], bool] = lambda error: error.retryable,
) -> T:
    """Await `call()`, again after each error that is `repeatable`, for as long as the next attempt begins `within_s`.

    The pauses are those that the server asks for, or else grow from a quarter of a second to five. Raises the last
    error.
    """
    begun, pause_s = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except ProxyError as error:
            wait_s = pause_s if error.retry_after_s is None else error.retry_after_s
            if not repeatable(error) or time.monotonic() + wait_s > begun + within_s:
                raise
            logger.warning("%s; trying again in %g s", error, wait_s)
        await asyncio.sleep(wait_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
