"""Sessions that end, expire and are deleted while turns run: what was answered is stored, or deleted with them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from proxy.sessions.idle_sweep import IdleSweep
from tests.torture.asking import Asker, Reply
from tests.torture.callers import Answer, Caller
from tests.torture.runs import World, scenario
from tests.torture.seam import EPOCH_S
from tests.torture.sites import Called, Site, check_database

_CLOSED, _GONE = 403, 404
_WAIT_S = 500.0
_IDLE_S = 4.0
_ON_ITS_WAY_S = 2.5
"""How long a reply may be on its way to its client: each step of a slow loop takes 0.2 s."""


@dataclass
class _Call:
    """`came` is None until the answer is there; `done`: it changed something."""

    sent: float
    came: float | None = None
    done: bool = False


class _Session:
    """What happened to the sessions that had one name after each other."""

    def __init__(self, world: World, site: Called, name: str) -> None:
        self._world, self._site, self.name = world, site, name
        self._caller = Caller(world, site)
        self._deletions: list[_Call] = []
        self._ends: list[_Call] = []
        self.replies: list[Reply] = []

    async def delete(self) -> None:
        """Delete the session, if there is one."""
        await self._change(self._deletions, "DELETE", f"/rl/sessions/{self.name}")

    async def end(self) -> None:
        """End the session, if there is one."""
        await self._change(self._ends, "POST", f"/{self.name}/rl/end_session")

    async def await_end(self) -> None:
        """Wait for the end of the session, which comes with all others at the latest."""
        await self._world.until(lambda: bool(self.replies))
        body = {"session_id": self.name, "wait_s": _WAIT_S}
        answer = await self._caller.call("POST", "/trajectories/export", body, refused=(_GONE,), once=False)
        assert answer.came - answer.sent < _WAIT_S / 2, f"nobody woke who waits for the end of {self.name}"

    def note(self, reply: Reply) -> None:
        """Take a reply. Raises AssertionError if it may not have been given."""
        self.replies.append(reply)
        open_again = [deletion for deletion in self._deletions if deletion.came is None or deletion.done]
        for end in self._ends:
            ended = end.done and end.came is not None and end.came <= reply.sent
            if ended and not any((each.came or self._world.loop.time()) >= end.sent for each in open_again):
                assert reply.status != 200, "a turn was answered after the end"

    async def check(self) -> None:
        """Raise AssertionError unless what was answered is stored, but for what was deleted."""
        exchange = await self._site.call("GET", f"/rl/sessions/{self.name}")
        assert exchange is not None and exchange.status in (200, _GONE), exchange
        nodes = exchange.body["interactions"] if exchange.status == 200 else []
        stored = {node["id"] for node in nodes if node["status"] == "complete"}
        kept: dict[int, set[str]] = {}
        for reply in self.replies:
            if reply.status == 200:
                self._check_reply(reply, stored)
                kept.setdefault(reply.seed, set()).update({reply.id} & stored)
        if exchange.status == 200:
            await self._site.check_stored(self.name, {seed: ids for seed, ids in kept.items() if ids})

    def _check_reply(self, reply: Reply, stored: set[str]) -> None:
        done = [deletion for deletion in self._deletions if deletion.done]
        if reply.id in stored:
            assert all(each.sent <= reply.came for each in done), f"a deleted turn came back: {reply}"
        else:
            assert any((each.came or 0.0) >= reply.sent for each in done), f"an answered turn is lost: {reply}"

    async def _change(self, calls: list[_Call], method: str, path: str) -> None:
        call = _Call(self._world.loop.time())
        calls.append(call)
        answer: Answer = await self._caller.call(method, path, {}, refused=(_GONE,))
        call.came, call.done = answer.came, answer.status == 200


async def _agent(world: World, asker: Asker, session: _Session) -> None:
    for _ in range(world.random.randrange(1, 4)):
        await world.some_time(0.4)
        reply = await asker.ask(f"/{session.name}", refused=(_CLOSED, _GONE))
        assert reply is not None
        session.note(reply)


async def _environment(world: World, session: _Session) -> None:
    for _ in range(world.random.randrange(1, 4)):
        await world.some_time(0.6)
        await world.random.choice([session.delete, session.end])()


async def _forget(world: World, site: Site) -> None:
    for _ in range(world.random.randrange(3)):
        await world.some_time(0.6)
        site.forget_idle()


@scenario
async def sessions_end_and_are_deleted(world: World) -> None:
    """Answered turns are stored once, or deleted with their session for good; no wait outlasts an end."""
    site = Site(world, alone=world.random.random() < 0.5, shutdown_timeout_s=0.5)
    asker = Asker(world, site)
    async with site.running():
        sessions = [_Session(world, site, f"s{number}") for number in range(2)]
        waiting = [asyncio.create_task(session.await_end()) for session in sessions]
        await world.all(
            *(_agent(world, asker, session) for session in sessions * 2),
            *(_environment(world, session) for session in sessions),
            world.random.choice([site.restarts, lambda: _forget(world, site)])(),
        )
        await world.all(*(session.end() for session in sessions))
        await world.all(*(session.check() for session in sessions), *map(_done, waiting))
        await site.stop()
        await site.start()
        await world.all(*(session.check() for session in sessions))
    check_database(world)


async def _done(task: asyncio.Task[None]) -> None:
    await task


class _Sweeps:
    """The moments at which a server begins to look for idle sessions."""

    def __init__(self) -> None:
        self._begin = asyncio.Event()

    async def next(self) -> None:
        """Wait for the next one."""
        self._begin.clear()
        await self._begin.wait()

    @contextmanager
    def noticed(self) -> Iterator[None]:
        """Notice those of the servers that run meanwhile."""
        expire = IdleSweep.expire_idle

        async def noted(sweep: IdleSweep, idle_s: float) -> None:
            self._begin.set()
            await expire(sweep, idle_s)

        with mock.patch.object(IdleSweep, "expire_idle", noted):
            yield


async def _patient(world: World, asker: Asker, sweeps: _Sweeps, name: str, replies: list[Reply]) -> None:
    """An agent that pauses for a while before it asks again, often as its session expires, and stops at its end."""
    last = world.loop.time()
    for _ in range(world.random.randrange(1, 4)):
        if world.random.random() < 0.5:
            await asyncio.sleep(_IDLE_S * world.random.uniform(0.7, 1.0))
            await sweeps.next()
        await world.some_time(world.random.choice([0.0, 1.0, 2 * _IDLE_S]))
        reply = await asker.ask(f"/{name}", refused=(_CLOSED,))
        assert reply is not None
        if reply.status == _CLOSED:
            unused_s = reply.sent - last
            assert unused_s > _IDLE_S - _ON_ITS_WAY_S, f"{name} expired, and was used {unused_s} s before"
            return
        replies.append(reply)
        last = _used_at(reply)


def _used_at(reply: Reply) -> float:
    """When a session was used last, as far as its agent can tell: to hear an answer again is no use."""
    return reply.sent if reply.again else reply.came


async def _check_expired(site: Called, answered: dict[str, list[Reply]]) -> None:
    for name, replies in answered.items():
        by_seed: dict[int, set[str]] = {}
        for reply in replies:
            by_seed.setdefault(reply.seed, set()).add(reply.id)
        if replies:
            await site.check_stored(name, by_seed)
            tree = await site.ok("GET", f"/rl/sessions/{name}")
            assert tree["status"] == "expired", f"{name} is {tree['status']}"
            unused_s = tree["ended_at"] - EPOCH_S - _used_at(replies[-1])
            assert unused_s > _IDLE_S - _ON_ITS_WAY_S, f"{name} expired {unused_s} s after its last turn"


@scenario
async def sessions_expire(world: World) -> None:
    """A session expires after it was not used for a while, and never before, however long its turns take."""
    site = Site(
        world,
        alone=world.random.random() < 0.5,
        session_idle_s=_IDLE_S,
        tick_s=world.random.choice([0.01, 0.2]),
        max_turns_in_flight=world.random.choice([2, 100]),
    )
    asker, sweeps = Asker(world, site, most_tokens=40), _Sweeps()
    answered: dict[str, list[Reply]] = {f"s{number}": [] for number in range(3)}
    with sweeps.noticed():
        async with site.running():
            await world.all(*(_patient(world, asker, sweeps, name, replies) for name, replies in answered.items()))
            await asyncio.sleep(3 * _IDLE_S)
            await _check_expired(site, answered)
    check_database(world)
