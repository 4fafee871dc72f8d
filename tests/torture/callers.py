"""Callers of control endpoints, which leave now and then and send their call again until it is answered."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any, NamedTuple

from tests.torture.runs import World
from tests.torture.sites import Called

_TRIES = 200
_BUSY = (429, 503)


class Answer(NamedTuple):
    """`sent`, `came`: when the first try was sent and the answer came, in seconds of the loop."""

    status: int
    body: Any
    sent: float
    came: float


class Caller:
    """`leave`: how likely a try is given up somewhere. A call has one Idempotency-Key for all its tries."""

    def __init__(self, world: World, site: Called, leave: float = 0.2) -> None:
        self._world, self._site, self._leave = world, site, leave
        self._name, self._calls = world.random.randbytes(8).hex(), 0

    async def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Answer:
        """The answer 200 of a call. Raises AssertionError for a refusal, or if none comes."""
        return await self.call(method, path, body, **headers)

    async def call(
        self, method: str, path: str, body: Any = None, *, refused: Collection[int] = (), once: bool = True, **more: str
    ) -> Answer:
        """The answer of a call. `refused`: statuses that may be one, too. `once`: it has an Idempotency-Key.

        Raises AssertionError for another status, or if no answer comes.
        """
        self._calls += 1
        headers = more | ({"idempotency_key": f"{self._name}-{self._calls}"} if once else {})
        sent = self._world.loop.time()
        for _ in range(_TRIES):
            exchange = await self._site.call(method, path, body, leave=self._leave, **headers)
            if exchange is not None and exchange.complete:
                if exchange.status in (200, *refused):
                    return Answer(exchange.status, exchange.body, sent, self._world.loop.time())
                assert exchange.status in _BUSY, (method, path, exchange.status, exchange.content)
            await asyncio.sleep(self._world.random.uniform(0.02, 0.5))
        raise AssertionError(f"no answer in {_TRIES} tries: {method} {path}")
