"""Delivers the events of the outbox. Each receiver has a loop of its own, so a slow one delays no other.

Every attempt is taken under a lease before it is made, and what became of it is stored afterwards: a crash in between
repeats it. Redirects are not followed, and no body of an answer is read: its status decides.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.settings import Settings
from proxy.settings.checks import listed, read_webhook_secret
from proxy.store.bell import heard
from proxy.store.deliveries import Delivery, Settled, Take
from proxy.store.outbox import Outbox
from proxy.webhooks.signatures import signed_headers
from tokengrove.errors import ProxyError

if TYPE_CHECKING:
    import httpx

logger = logging.getLogger(__name__)

_AT_ONCE = 16
# Other workers and servers do not notify this one of their events.
_WATCH_S = 1.0
# A lease also covers storing what became of the attempts.
_MORE_LEASE_S = 20.0
_FIRST_S, _LONGEST_S = 2.0, 3600.0
_GONE = 410


def pause_after(attempts: int) -> float:
    """Seconds until the next attempt: 2, 4, 8 ... up to an hour, each times a random number between 0.5 and 1.5."""
    return float(min(_FIRST_S * 2.0 ** min(attempts - 1, 30), _LONGEST_S) * random.uniform(0.5, 1.5))


class Deliverer:
    """Delivers events to the URLs of the outbox.

    One process of a server runs it. The servers of a database share the work.
    """

    def __init__(self, outbox: Outbox, settings: Settings, pause_s: Callable[[int], float] = pause_after) -> None:
        """`pause_s` returns the seconds until the next attempt, given the number of attempts that have failed."""
        self._outbox, self._pause_s = outbox, pause_s
        self._secrets = [read_webhook_secret(each) for each in listed(settings.webhook_secret)]
        self._timeout_s, self._attempts = settings.webhook_timeout_s, settings.webhook_attempts

    async def run(self) -> None:
        """Deliver until cancelled."""
        async with asyncio.TaskGroup() as loops:
            for url in self._outbox.urls:
                loops.create_task(self._serve(url))

    async def _serve(self, url: str) -> None:
        import httpx

        secure = urlsplit(url).scheme == "https"
        async with httpx.AsyncClient(
            verify=ssl.create_default_context() if secure else False,
            trust_env=False,
            follow_redirects=False,
            timeout=None,  # `_attempt` bounds the whole of it
        ) as client:
            while True:
                news = self._outbox.news.listen()
                try:
                    due = await self._outbox.next_due(url)
                    if due is not None and due <= time.time():
                        await self._deliver_some(client, url)
                        continue
                except ProxyError as error:
                    logger.warning("webhooks wait for the database: %(why)s", {"why": error.message})
                    due = None
                await heard(news, _WATCH_S if due is None else min(_WATCH_S, max(due - time.time(), 0.0)))

    async def _deliver_some(self, client: httpx.AsyncClient, url: str) -> None:
        taken = await self._outbox.take(Take(url, _AT_ONCE, self._timeout_s + _MORE_LEASE_S))
        settled = await asyncio.gather(*(self._attempt(client, each) for each in taken))
        if settled:
            await self._outbox.settle(settled)

    async def _attempt(self, client: httpx.AsyncClient, delivery: Delivery) -> Settled:
        """Make one attempt, which never raises."""
        error, gone = await self._post(client, delivery)
        if error is None:
            return Settled(delivery.id, delivery.url)
        last = gone or delivery.attempts >= self._attempts
        due_at = None if last else time.time() + self._pause_s(delivery.attempts)
        fields = {"id": delivery.id, "event": delivery.event, "attempts": delivery.attempts, "why": error}
        logger.log(
            logging.ERROR if last else logging.WARNING,
            "a webhook is a dead letter" if last else "a webhook was not accepted",
            fields,
        )
        return Settled(delivery.id, delivery.url, error, due_at)

    async def _post(self, client: httpx.AsyncClient, delivery: Delivery) -> tuple[str | None, bool]:
        """Why a receiver did not accept a delivery (None: it did), and whether it never will."""
        headers = {
            "content-type": "application/json",
            "user-agent": "tokengrove",
            **signed_headers(delivery.id, int(time.time()), delivery.body, self._secrets),
        }
        try:
            async with (
                asyncio.timeout(self._timeout_s),
                client.stream("POST", delivery.url, content=delivery.body.encode(), headers=headers) as answer,
            ):
                status = answer.status_code
        except TimeoutError:
            return f"no answer within {self._timeout_s:g} s", False
        except Exception as error:  # of the network, of TLS, of an answer that is not HTTP
            return f"{type(error).__name__}: {error}"[:500], False
        return (None, False) if answer.is_success else (f"HTTP {status}", status == _GONE)
