"""Single turns: each is sent until it is answered or refused, by a client that leaves now and then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from typing import Any, NamedTuple

from tests.torture.runs import World
from tests.torture.sites import Called
from tests.torture.wire import Exchange

_TRIES = 200
_BUSY = (429, 503)


class Reply(NamedTuple):
    """`id`: of the turn; empty if it was refused with `status`.

    `session`: that of the header, which only callers get that did not name it.
    `sent`, `came`: of the try that was answered, in seconds of the loop. `again`: earlier tries had no answer, so the
    turn may have ended long before this reply of it came.
    """

    status: int
    id: str
    session: str
    seed: int
    sent: float
    came: float
    again: bool


class Asker:
    """Asks turns of up to `most_tokens`, each with a seed of its own. `leave`: how likely a try is given up."""

    def __init__(self, world: World, site: Called, *, most_tokens: int = 20, leave: float = 0.2) -> None:
        self._world, self._site, self._most, self._leave = world, site, most_tokens, leave
        self._seed = 0

    async def ask(
        self, address: str, *, refused: Collection[int] = (), tries: int = _TRIES, **headers: str
    ) -> Reply | None:
        """The reply to a turn, or its refusal with one of `refused`; None if all `tries` were given up.

        `address`: what comes before `/v1`. Raises AssertionError for another refusal.
        """
        self._seed += 1
        seed, random = self._seed, self._world.random
        stream = random.random() < 0.5
        body = {
            "model": "m",
            "messages": [{"role": "user", "content": f"turn {seed}"}],
            "max_tokens": random.randrange(1, self._most + 1),
            "seed": seed,
            "stream": stream,
        }
        for number in range(tries):
            sent = self._world.loop.time()
            exchange = await self._site.call(
                "POST",
                f"{address}/v1/chat/completions",
                body,
                leave=self._leave,
                idempotency_key=f"{address} {seed}",
                **headers,
            )
            came = self._world.loop.time()
            if exchange is not None and exchange.complete:
                if exchange.status in refused:
                    return Reply(exchange.status, "", "", seed, sent, came, number > 0)
                if exchange.status == 200 and (name := _id_in(exchange, stream=stream, refused=refused)) is not None:
                    return Reply(200, name, _session_of(exchange), seed, sent, came, number > 0)
                assert exchange.status in (200, *_BUSY), (exchange.status, exchange.content)
            await asyncio.sleep(random.uniform(0.02, 0.5))
        assert tries < _TRIES, f"no answer in {tries} tries at {address}"
        return None


def _session_of(exchange: Exchange) -> str:
    return next((value.decode() for name, value in exchange.headers if name == b"x-tokengrove-session"), "")


def _id_in(exchange: Exchange, *, stream: bool, refused: Collection[int]) -> str | None:
    """The id of the turn that was answered in full; None for an error in a stream."""
    if not stream:
        name: str = exchange.body["id"]
        return name
    events = [line[6:] for line in exchange.content.decode().split("\n") if line.startswith("data: ")]
    chunks: list[dict[str, Any]] = [json.loads(event) for event in events if event != "[DONE]"]
    if events[-1] != "[DONE]" or any("error" in chunk for chunk in chunks):
        return None
    first: str = chunks[0]["id"]
    return first
