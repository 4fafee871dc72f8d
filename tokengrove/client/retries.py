"""Retries of calls while the server or its database is unavailable, or a limit is reached.

All attempts of a call have the same `Idempotency-Key`, so a call whose answer was lost takes effect once. Calls to the
engine and the mailbox could still take effect twice (`Repeat.UNSENT`), so they are retried only if they certainly did
not arrive.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from dataclasses import replace
from math import isnan

from tokengrove.client.operations import Call, Repeat
from tokengrove.client.unreachable import ServerUnreachable
from tokengrove.errors import (
    SHUTTING_DOWN,
    InvalidRequest,
    ProxyError,
    StoreUnavailable,
    TooManyConnections,
    TooManyRequests,
)

logger = logging.getLogger(__name__)

RETRY_S = 120.0
"""Seconds that calls are retried by default: enough for the restart of a database or a server."""

LEAVE_S = 10.0
"""Seconds that the end of a session is retried after a cancellation or Ctrl-C has left its block."""

_FIRST_PAUSE_S = 0.25
_LONGEST_PAUSE_S = 5.0


class Clock:
    """The time, the waits and the randomness of retries; tests replace it."""

    def now(self) -> float:
        """Seconds since an arbitrary time."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Block this thread; Ctrl-C ends it."""
        time.sleep(seconds)

    async def wait(self, seconds: float) -> None:
        """`sleep` for asyncio; it can be cancelled."""
        await asyncio.sleep(seconds)

    def share(self) -> float:
        """A random number from 0 to 1, so that clients that failed together do not retry together."""
        return random.random()


class Attempts:
    """The attempts of one call: how long it is retried, and the pauses between attempts.

    `call`: the call of every attempt. The pauses grow from 0.25 to 5 seconds, are randomly up to half shorter, and are
    never shorter than the server's `Retry-After`.
    """

    def __init__(self, call: Call, retry_s: float, clock: Clock) -> None:
        self.call = _keyed(call)
        self._retry_s, self._clock = retry_s, clock
        self._begun, self._failures = clock.now(), 0

    def pause_s(self, error: ProxyError) -> float:
        """Seconds until the next attempt. Raises `error` if there is none, with the number and time of the attempts."""
        self._failures += 1
        tried_s = self._clock.now() - self._begun
        left_s = self._retry_s - tried_s
        asked_s = (error.retry_after_s or 0.0) * (1 + self._clock.share() / 4)
        if left_s <= 0 or asked_s > left_s or not may_repeat(self.call, error):
            if self._failures > 1:
                _say(error, f"{error.message} (tried {self._failures} times in {tried_s:.1f} s)")
            raise error
        pause_s = min(_FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 9), _LONGEST_PAUSE_S)
        pause_s *= 1 - self._clock.share() / 2
        level = logging.WARNING if self._failures == 1 else logging.DEBUG
        told = "%s %s: %s; it is tried again for up to %.0f s"
        logger.log(level, told, self.call.method, self.call.path, error, left_s)
        return max(min(pause_s, left_s), asked_s)


def may_repeat(call: Call, error: ProxyError) -> bool:
    """Whether a retry of `call` after `error` may succeed, and cannot take effect twice."""
    if call.repeat is Repeat.NEVER:
        return False
    full = isinstance(error, TooManyRequests) and error.retry_after_s is not None
    if isinstance(error, ServerUnreachable):
        return error.retryable and (call.repeat is not Repeat.UNSENT or error.unsent)
    refused = full or isinstance(error, TooManyConnections) or error.message == SHUTTING_DOWN
    return refused or (call.repeat is not Repeat.UNSENT and isinstance(error, StoreUnavailable))


def checked_retry_s(retry_s: float) -> float:
    """Return `retry_s`. Raises InvalidRequest unless it is a number of seconds."""
    if isnan(retry_s) or retry_s < 0:
        raise InvalidRequest(f"'retry_s' is a number of seconds, 0 for never, not {retry_s}", param="retry_s")
    return retry_s


def _keyed(call: Call) -> Call:
    """The call with a new idempotency key, if it changes something and its caller gave none."""
    changes = call.method != "GET" and call.repeat in (Repeat.ALWAYS, Repeat.UNSENT)
    if changes and call.idempotency_key is None:
        return replace(call, idempotency_key=uuid.uuid4().hex)
    return call


def _say(error: ProxyError, message: str) -> None:
    error.message = message
    error.args = (message,)
