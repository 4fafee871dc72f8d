"""Agents that ask, leave, come back and ask again, on one worker and on several, across pauses and restarts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

from proxy.engine.interface import PauseMode
from proxy.turns.turns import GRACE_S
from tests.torture.runs import World, scenario
from tests.torture.sites import Called, Site, check_database
from tests.torture.wire import Exchange

_TRIES = 200


class Agents:
    """What the agents of a scenario got. `answered`: by session and seed, the ids of replies that came in full."""

    def __init__(
        self,
        world: World,
        site: Called,
        *,
        once: bool = True,
        twice: float = 0.2,
        keyed: bool = True,
        back_s: float = 1.0,
    ) -> None:
        """`once`: no request is sampled twice, however often it is sent. `twice`: how likely it is sent to two.

        `keyed`: each has an Idempotency-Key. `back_s`: when it is sent again at the latest.
        """
        self._world, self._site, self._once, self._twice, self._keyed = world, site, once, twice, keyed
        self._back_s = back_s
        self.answered: dict[str, dict[int, set[str]]] = {}
        self._before: dict[str, dict[int, str]] = {}
        """By session and seed, the id of the reply that the request went on from."""
        self._seed = 0

    async def play(self, session: str, turns: int, *, leave: float = 0.3, most_n: int = 2) -> None:
        """Ask turn after turn, each until it is answered."""
        messages: list[dict[str, Any]] = [{"role": "user", "content": f"of {session}"}]
        before = ""
        for _ in range(turns):
            await self._world.some_time(0.2)
            self._seed += most_n  # each choice has a seed of its own: equal ones would give equal answers
            seed, n = self._seed, self._world.random.randrange(1, most_n + 1)
            reply = await self.ask(session, seed, messages, n, leave)
            self._before.setdefault(session, {})[seed] = before
            messages, before = [*messages, reply["message"], {"role": "user", "content": "go on"}], reply["id"]

    async def ask(self, session: str, seed: int, messages: list[Any], n: int, leave: float) -> dict[str, Any]:
        """Ask until it is answered in full; return the id of the reply and the first choice's message."""
        stream = n == 1 and self._world.random.random() < 0.5
        body = {
            "model": "m",
            "messages": messages,
            "max_tokens": self._world.random.randrange(1, 30),
            "seed": seed,
            "n": n,
            "stream": stream,
        }
        exchanges: list[Exchange | None] = []
        for _ in range(_TRIES):
            twice = self._world.random.random() < self._twice  # as of a client or load balancer that does not wait
            path = f"/{session}/v1/chat/completions"
            headers = {"idempotency_key": f"key {session} {seed}"} if self._keyed else {}
            exchanges = await self._world.all(
                *(self._site.call("POST", path, body, leave=leave, **headers) for _ in range(1 + twice))
            )
            replies = [reply for exchange in exchanges if (reply := _answer(exchange, stream=stream)) is not None]
            for reply in replies:
                own = self.answered.setdefault(session, {}).setdefault(seed, set())
                own |= {reply["id"]} | {f"{reply['id']}.{index}" for index in range(1, n)}
                assert len(own) == n or not self._once, f"one request got several answers: {own}"
            if replies:
                return replies[0]
            await asyncio.sleep(self._world.random.uniform(0.05, self._back_s))
        got = [exchange and (exchange.status, exchange.content) for exchange in exchanges]
        raise AssertionError(f"no answer in {_TRIES} tries, at last {got}")

    async def check(self) -> None:
        """See what is stored of all of them."""
        for session, answered in self.answered.items():
            await self._site.check_stored(session, answered, once=self._once)
            await self._check_parents(session, answered)

    async def _check_parents(self, session: str, answered: dict[int, set[str]]) -> None:
        """Each turn goes on from the reply that its request had, whoever answered that."""
        nodes = (await self._site.ok("GET", f"/rl/sessions/{session}"))["interactions"]
        parents = {node["id"]: node["parent_id"] for node in nodes}
        for seed, before in self._before[session].items():
            for name in answered[seed]:
                parent = (parents[name] or "").partition(".")[0]
                assert parent == before or (before and parent and not self._once), f"{name} follows {parent}: {before}"


def _answer(exchange: Exchange | None, *, stream: bool) -> dict[str, Any] | None:
    """The reply that a client got in full, if any. Raises AssertionError for a refusal that no client should see."""
    if exchange is None or not exchange.complete:
        return None
    if exchange.status == 200:
        return _reply(exchange, stream=stream)
    assert exchange.status in (409, 429, 503), (exchange.status, exchange.content)
    return None


def _reply(exchange: Exchange, *, stream: bool) -> dict[str, Any] | None:
    """The id and the message of an answer; None if it is an error."""
    if not stream:
        body = exchange.body
        return {"id": body["id"], "message": body["choices"][0]["message"]}
    events = [line[6:] for line in exchange.content.decode().split("\n") if line.startswith("data: ")]
    if events[-1] != "[DONE]":
        return None
    chunks = [json.loads(event) for event in events[:-1]]
    if any("error" in chunk for chunk in chunks):
        return None
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    return {"id": chunks[0]["id"], "message": {"role": "assistant", "content": text}}


async def _engine_control(world: World, site: Site, rounds: int) -> None:
    """Pauses in all modes and weight updates, which end. A pause lasts until then, whatever others do."""
    for _ in range(rounds):
        await world.some_time(1.0)
        mode = world.random.choice(list(PauseMode)).value
        if world.random.random() < 0.5:
            await site.ok("POST", "/engine/update_weights", {"path": "w", "mode": mode})
        else:
            await site.ok("POST", "/engine/pause_generation", {"mode": mode})
            await world.some_time(1.0)
            assert site.paused, "a pause has ended although nobody ended it"
            await site.ok("POST", "/engine/continue_generation", {})


async def _weight_updates(world: World, site: Site) -> None:
    """Somebody else updates the weights meanwhile."""
    for _ in range(world.random.randrange(3)):
        await world.some_time(2.0)
        mode = world.random.choice(list(PauseMode)).value
        await site.ok("POST", "/engine/update_weights", {"path": "w", "mode": mode})


async def _whole(
    world: World,
    site: Site,
    *more: Callable[[], Awaitable[None]],
    sessions: int = 3,
    n: int = 2,
    back_s: float = 1.0,
) -> None:
    agents = Agents(world, site, back_s=back_s)
    async with site.running():
        await world.all(
            *(agents.play(f"s{number}", world.random.randrange(1, 4), most_n=n) for number in range(sessions)),
            *(each() for each in more),  # type: ignore[arg-type]
        )
        await agents.check()
    check_database(world)


@scenario
async def turns_and_disconnects(world: World) -> None:
    """Clients leave at every moment and ask again, some once their turn was given up: each answer is stored once."""
    tick_s = world.random.choice([0.01, 0.2])
    site = Site(world, tick_s=tick_s, max_turns_in_flight=world.random.choice([2, 3, 100]))
    await _whole(world, site, back_s=2 * GRACE_S)


@scenario
async def turns_and_pauses(world: World) -> None:
    """The same, while the engine is paused and gets new weights."""
    site = Site(world, pause_timeout_s=10_000.0)
    await _whole(world, site, lambda: _engine_control(world, site, 3), lambda: _weight_updates(world, site))


@scenario
async def turns_of_a_crowd(world: World) -> None:
    """The same, with more choices than there are places for."""
    site = Site(world, pause_timeout_s=10_000.0, shared_running_requests=world.random.choice([1, 2, 4]))
    await _whole(world, site, lambda: _engine_control(world, site, world.random.randrange(2)), n=6)


@scenario
async def turns_on_workers(world: World) -> None:
    """The same, with a connection to any worker for each try."""
    site = Site(world, workers=2, pause_timeout_s=10_000.0, max_turns_in_flight=world.random.choice([4, 100]))
    await _whole(world, site, lambda: _engine_control(world, site, world.random.randrange(3)))


@scenario
async def turns_and_restarts(world: World) -> None:
    """The server stops at every moment and starts again: no answered turn is lost."""
    site = Site(world, shutdown_timeout_s=world.random.choice([0.1, 5.0]))
    await _whole(world, site, site.restarts)
