"""A pool of SGLang servers that die, lie and leave, while a trainer transfers weights, loads adapters, takes memory."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from unittest import mock

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import CollectedReply
from proxy.engine.interface import MEMORY_TAGS, AdapterSource, PauseMode, WeightTransfer
from proxy.engine.pauses import Pauses
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.kinds import ServerKind, connect
from proxy.engine.servers.placement import Member
from proxy.engine.servers.pool import Pool
from proxy.engine.servers.remote import RemoteEngine
from proxy.types import Message, Role, SamplingParams, TurnRequest
from tests.engines.gates import AdminGate
from tests.engines.pools import Notes
from tests.engines.scripts import VOCABULARY, following
from tests.torture.runs import World, scenario
from tests.torture.scenarios.servers import seeded
from tests.torture.sglang import Server, connected, sampled_by
from tests.unit.proxy.engine.gated import asking, uninterrupted
from tokengrove.errors import EngineLost, InvalidRequest, ProxyError
from tokengrove.reasons import FinishReason

_TIMEOUT_S, _CHECK_S = 30.0, 0.2
_LIES = ("0", "1", "2", "3", "40", "none of these", "")


class _Pool(Pool):
    """`loose`: the only server was let in with the weights that it had, which only the trainer can know."""

    def __init__(self, servers: Mapping[str, Server], opener: Callable[[str], Awaitable[RemoteEngine]]) -> None:
        super().__init__(list(servers), opener, start_timeout_s=5.0, check_s=_CHECK_S, engine_timeout_s=_TIMEOUT_S)
        self._servers, self.loose = servers, False

    async def _agree(self, member: Member, *, proven: bool = False) -> None:
        managed = self._state.managed
        await super()._agree(member, proven=proven)
        alone = not [other for other in self._alive() if other is not member]
        self.loose = self.loose or managed > self._state.managed or (alone and self._servers[member.url].torn)


class _Trainer:
    """Changes weights and memory. Once something has failed it loads weights from disk before it goes on."""

    def __init__(self, world: World, admin: Any) -> None:
        self._world, self._admin = world, admin
        self._version = 0

    async def trains(self) -> None:
        for _ in range(self._world.random.randrange(1, 4)):
            await self._world.some_time(2.0)
            await self._world.random.choice([self.update, self._transfer, self._transfer, self._memory])()

    async def update(self) -> None:
        self._version += 1
        await self._again(lambda: self._admin.update_weights("w", self._version, self._mode()))

    async def _transfer(self) -> None:
        await self._again(lambda: self._admin.pause(self._mode()))
        self._version += 1
        try:
            await self._parts()
        except ProxyError:
            await self.update()
        await self._again(self._admin.resume)

    async def _parts(self) -> None:
        """The steps of a transfer, with or without brackets, named by all parts or by the last one."""
        count, bracketed = self._world.random.randrange(1, 6), self._world.random.random() < 0.5
        named = {"weight_version": str(self._version)}
        of_all = not bracketed and self._world.random.random() < 0.5
        steps = [(WeightTransfer.FROM_DISTRIBUTED, {"part": part, "of": count}) for part in range(count)]
        for at, (step, fields) in enumerate(steps):
            last = not bracketed and at == count - 1
            steps[at] = step, {**fields, "target": self._version, **(named if of_all or last else {})}
        if bracketed:
            steps = [(WeightTransfer.BEGIN, {}), *steps, (WeightTransfer.END, named)]
        for step, fields in steps:
            await self._admin.transfer_weights(step, fields)
            await self._world.some_time(1.0)

    async def _memory(self) -> None:
        mode = self._world.random.choice([PauseMode.ABORT, PauseMode.DRAIN])
        with suppress(ProxyError):
            await self._admin.release_memory((), mode)
        await self._world.some_time(2.0)
        tags = list(MEMORY_TAGS)
        self._world.random.shuffle(tags)
        for part in (tags[:1], tags[1:]):
            await self._again(lambda part=part: self._admin.resume_memory(tuple(part)))
            await self._world.some_time(0.5)

    async def _again(self, work: Callable[[], Awaitable[object]]) -> None:
        for _ in range(200):
            try:
                await work()
            except ProxyError:
                await asyncio.sleep(0.5)
            else:
                return
        await work()

    def _mode(self) -> PauseMode:
        return self._world.random.choice(list(PauseMode))


class _Clients:
    """Ask, and look at what the tokens say of themselves."""

    def __init__(self, world: World, pool: _Pool, gate: AdminGate, servers: Mapping[str, Server]) -> None:
        self._world, self._pool, self._gate = world, pool, gate
        self._servers = list(servers.values())
        self.adapters: list[int] = []

    async def publishes(self) -> None:
        """Load adapters, one after the other."""
        for version in range(100, 100 + self._world.random.randrange(4)):
            await self._world.some_time(2.0)
            with suppress(ProxyError):  # all servers may be away
                await self._pool.load_adapter(version, AdapterSource(f"/adapters/{version}"))
                self.adapters.append(version)

    async def calls(self, number: int) -> None:
        for part in range(self._world.random.randrange(1, 4)):
            await self._world.some_time(3.0)
            request = asking(f"{number}.{part}", self._world.random.randrange(1, 40), start=40 + number)
            await self.asks(replace(request, adapter=self._world.random.choice([None, *self.adapters])))

    async def asks(self, request: GenerateRequest) -> None:
        if self._world.random.random() < 0.3:
            turn = TurnRequest(api="chat", model="m", messages=(Message(Role.USER, "hi"),), sampling=SamplingParams())
            request = replace(request, turn=turn)
        reply, unsure = CollectedReply(), 0

        def take(chunk: TokenChunk) -> FinishReason | None:
            nonlocal unsure
            unsure += chunk.unsure
            return reply.add(chunk)

        async def sampled() -> FinishReason:
            return await self._gate.sample(request, take)

        try:
            finish = await self._world.abandon_some(sampled(), 1.0, chance=0.2)
        except EngineLost as error:
            assert any(server.lied for server in self._servers), f"no server lied, and yet: {error}"
            return
        if finish is None:
            return
        if request.adapter is not None:
            assert list(reply.ids) == following(request.input_ids, len(reply.ids), request.adapter)
            assert set(reply.versions) == {request.adapter} and len(reply.ids) == request.sampling.max_tokens
            return
        assert list(reply.ids) == uninterrupted(request)
        for version, logprob in zip(reply.versions, reply.logprobs, strict=True):
            number, weights = sampled_by(logprob)
            server = self._servers[number]
            if self._pool.loose:
                continue
            assert weights in server.had, f"{server.url} has parts of two versions, and sampled as version {version}"
            assert version <= max(server.had), f"{server.url} had {server.had}, and sampled as version {version}"
            if not unsure and not server.lied:
                assert version == weights, f"{server.url} had {weights}, and sampled as version {version}"


async def _mishaps(world: World, pool: Pool, server: Server) -> None:
    for _ in range(world.random.randrange(4)):
        await _some_moment(world, pool)
        kind = world.random.choice(["dies", "cut off", "lies", "leaves"])
        if kind == "dies":
            await _restart(world, server)
        elif kind == "cut off":
            server.reachable = False
            await world.some_time(1.0)
            server.reachable = True
        elif kind == "lies":
            server.deceive(world.random.choice(_LIES))
            await world.some_time(5.0)
            server.deceive(None)
        elif server.url in _urls(pool):
            await _leave(world, pool, server)


async def _some_moment(world: World, pool: Pool) -> None:
    """Wait for any time, or until all servers are being changed."""
    latest, changed = world.loop.time() + world.random.uniform(0.0, 3.0), world.random.random() < 0.5
    await world.until(lambda: world.loop.time() >= latest or (changed and pool._changes > 0))
    await world.some_time(0.1)


def _urls(pool: Pool) -> list[str]:
    return [shown["url"] for shown in pool.servers()]


async def _restart(world: World, server: Server) -> None:
    """Die, for so long that the pool sees it."""
    server.die()
    await asyncio.sleep(2.0)
    await world.some_time(1.0)
    server.rise()


async def _leave(world: World, pool: Pool, server: Server) -> None:
    """Leave the pool, perhaps while it is cut off, and join again. Told to release memory, it has to restart."""
    server.reachable = world.random.random() < 0.5
    member = next((member for member in pool._members if member.url == server.url), None)
    await pool.remove(server.url)
    await world.some_time(1.0)
    server.reachable = True
    for _ in range(20):
        if not server.whole or (member is not None and member.released):
            await _restart(world, server)
            member = None
        with suppress(InvalidRequest):  # it lacks weights that were transferred, until the next ones
            return await pool.add(server.url)
        await asyncio.sleep(0.5)


async def _end(world: World, trainer: _Trainer, pool: Pool, servers: Mapping[str, Server]) -> None:
    """With the next weights all servers come back."""
    await trainer.update()
    for server in servers.values():
        if server.url not in _urls(pool):
            await pool.add(server.url)
    await world.until(lambda: all(shown["state"] == "alive" for shown in pool.servers()))
    for server in servers.values():
        assert server.mode is None and server.whole and not server.running, vars(server)
        assert not server.wrong, server.wrong


@scenario
async def weights_of_servers(world: World) -> None:
    """Each token has the version of the weights that sampled it, and no server samples with parts of two versions."""
    servers = {
        server.url: server for server in (Server(world, number) for number in range(world.random.randrange(1, 4)))
    }
    with seeded(world), connected(servers), mock.patch("proxy.engine.servers.breaker._FIRST_WAIT_S", 0.1):
        opener = connect(VOCABULARY, ServerKind.SGLANG)
        pool = _Pool(servers, opener)
        pool.pauses = Pauses(Notes(), "one:1", clock=world.loop.time)
        await pool.start()
        gate = AdminGate(pool, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)
        trainer, clients = _Trainer(world, gate.admin), _Clients(world, pool, gate, servers)
        await world.all(
            *(clients.calls(number) for number in range(4)),
            *(_mishaps(world, pool, server) for server in servers.values()),
            trainer.trains(),
            clients.publishes(),
        )
        await _end(world, trainer, pool, servers)
        last = [replace(asking(f"last {each}", 3), adapter=each) for each in (None, *clients.adapters)]
        await asyncio.gather(*map(clients.asks, last))
        assert gate.running == gate.waiting == 0 and not gate.state.held and not gate._flights
        await pool.close()
        assert not pool._looks and not pool._trust._proofs._running and not pool.pauses.held
