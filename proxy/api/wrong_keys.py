"""Delays answers to wrong keys. The delay grows with the number of wrong keys of a sender; right keys are not delayed.

A waiting request reads no further data and holds only its connection. The number of waiting requests is bounded:
further wrong keys get 429 at once. A sender is a host; the table of hosts is also bounded.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from proxy.api.addresses import Addresses
from proxy.api.headers import headers_of, key_in
from proxy.api.long_polls import LongPolls
from proxy.resources.senders import Sender, Senders
from proxy.sessions.keys import WrongKey
from tokengrove.errors import ProxyError, TooManyRequests, Unauthorized

WRONG_KEYS = "tokengrove.wrong_keys"
"""The key of the server's `WrongKeys` in the scope of a request."""

LONGEST_S = 5.0
MOST_WAITING = 64
MOST_OF_ONE = 4
MOST_SENDERS = 4096
_FIRST_S = 0.01
_FORGOTTEN_S = 300.0


class WrongKeys:
    """The wrong keys of one process. `clock` gives seconds."""

    def __init__(
        self,
        addresses: Addresses,
        polls: LongPolls,
        clock: Callable[[], float] = time.monotonic,
        senders: Senders | None = None,
    ) -> None:
        self._addresses, self._polls, self._clock = addresses, polls, clock
        self._sent: OrderedDict[Sender, tuple[int, float]] = OrderedDict()
        self._waiting = (senders or Senders()).wrong_keys

    @property
    def waiting(self) -> int:
        """The number of waiting requests."""
        return self._waiting.total

    @property
    def senders(self) -> int:
        """The number of known senders."""
        return len(self._sent)

    def count(self, scope: Scope, error: ProxyError) -> Delay | None:
        """Count an error about a wrong key, and return its delay; None for other errors.

        Raises TooManyRequests if too many requests wait.
        """
        if not isinstance(error, Unauthorized | WrongKey) or not _has_key(scope):
            return None
        error.__traceback__ = error.__context__ = None  # its frames keep the data of the request alive
        sender = Sender(self._addresses.host(scope))
        delay_s = self._next(sender)
        if self.waiting >= MOST_WAITING or self._waiting.of.get(sender, 0) >= MOST_OF_ONE:
            raise TooManyRequests(
                "too many requests with wrong keys wait for their answers; send the right key",
                retry_after_s=math.ceil(delay_s),
            )
        self._waiting.add(sender, 1)
        return Delay(self, sender, delay_s)

    def _next(self, sender: Sender) -> float:
        """The delay of the sender's next wrong key in seconds. It doubles with each."""
        now = self._clock()
        sent, last = self._sent.pop(sender, (0, now))
        sent = 1 if now - last > _FORGOTTEN_S else sent + 1
        self._sent[sender] = sent, now
        if len(self._sent) > MOST_SENDERS:
            self._sent.popitem(last=False)
        return min(_FIRST_S * 2.0 ** min(sent - 1, 30), LONGEST_S)

    async def wait(self, seconds: float) -> None:
        """Wait, at most until the server stops."""
        if not self._polls.ending:
            await self._polls.wait(asyncio.sleep(seconds))

    def release(self, sender: Sender) -> None:
        """Forget a request that has waited."""
        self._waiting.add(sender, -1)


class Delay:
    """The wait of one request before its answer."""

    def __init__(self, keys: WrongKeys, sender: Sender, seconds: float) -> None:
        self.seconds = seconds
        self._keys, self.sender = keys, sender

    async def end(self) -> None:
        """Wait, then make room for another request."""
        try:
            await self._keys.wait(self.seconds)
        finally:
            self._keys.release(self.sender)


class DelayedResponse(Response):
    """A response that is sent after a delay."""

    def __init__(self, response: Response, delay: Delay) -> None:
        super().__init__(response.body, response.status_code)
        self.raw_headers = response.raw_headers
        self._delay = delay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Wait, then send the response."""
        await self._delay.end()
        await super().__call__(scope, receive, send)


def _has_key(scope: Scope) -> bool:
    """Whether a request has a key, in its headers or its address."""
    return "~" in scope["path"] or key_in(headers_of(scope)) is not None
