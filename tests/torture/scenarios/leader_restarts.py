"""The leading worker dies at any moment and is started again, in the middle of its news and of the pauses it begins."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from proxy.engine.interface import PauseMode
from proxy.telemetry.groups import EngineMetrics
from proxy.workers.leader import LEADER, Gates, Leader
from proxy.workers.peers import Unreachable
from tests.torture.runs import World, scenario
from tests.torture.workers import Peers, Worker
from tests.unit.proxy.engine.gated import WatchfulEngine, asking, uninterrupted

_ARRIVES_S = 0.1
"""The longest way of a call, which takes less than the start of a worker."""


class _Servers:
    """What outlives every worker: the engine servers' pause, and their weights."""

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.version = 0


class _Engine(WatchfulEngine):
    """A worker's view of the engine servers. `leads`: it changes them. `dead`: it changes nothing any more."""

    def __init__(self, world: World, servers: _Servers) -> None:
        super().__init__(0.01)
        self._world, self._servers = world, servers
        self._version = servers.version
        self.dead = False

    async def adopt(self, common: Mapping[str, Any]) -> None:
        await self._world.some_time(0.2)
        await super().adopt(common)

    async def pause(self, mode: PauseMode) -> None:
        if self.leads:
            await self._world.some_time(_ARRIVES_S)
            self._check_lives()
            self._servers.mode = mode
        await super().pause(mode)

    async def resume(self) -> None:
        if self.leads:
            await self._world.some_time(_ARRIVES_S)
            self._check_lives()
            self._servers.mode = None
        await super().resume()

    async def update_weights(self, path: str, version: int | None = None) -> int:
        await self._world.some_time(0.3)
        self._check_lives()
        self._servers.version = await super().update_weights(path, version)
        return self._servers.version

    def _check_lives(self) -> None:
        if self.dead:
            raise asyncio.CancelledError


def _worker(world: World, servers: _Servers) -> Worker:
    engine = _Engine(world, servers)
    engine.leads = False
    return Worker(engine, pause_timeout_s=100_000.0)


class _Server:
    """The workers of one server."""

    def __init__(self, world: World, count: int) -> None:
        self._world, self._count = world, count
        self.servers = _Servers()
        self.running = dict[int, Worker]()
        self.administers: asyncio.Task[None] | None = None
        self.may_pause = False
        """Somebody has asked for a pause, and has not been told that it has ended."""

    async def start(self, number: int) -> None:
        worker = self.running[number] = _worker(self._world, self.servers)
        peers: Any = _Peers(self._world, self.running, number)
        if number == LEADER:
            gates = Gates(worker.gate, peers)
            worker.leader = Leader(worker.engine, gates, worker.follower, peers, EngineMetrics())
        await worker.follower.catch_up(peers)
        if worker.leader is not None:
            await worker.leader.take_over()
        worker.ready = True

    async def kill(self, number: int) -> None:
        """End a worker. What it has asked of others is cancelled there soon after."""
        self.running.pop(number).engine.dead = True
        if number == LEADER and self.administers is not None:
            self.administers.cancel()
            with suppress(asyncio.CancelledError):
                await self.administers
        await asyncio.sleep(2 * _ARRIVES_S)
        await self._world.some_time(0.3)

    @property
    def admin(self) -> Any:
        leader = self.running[LEADER].leader
        assert leader is not None
        return leader.admin

    def check(self) -> None:
        """Raise AssertionError unless all workers know what holds at the engine servers."""
        first = self.running[LEADER]
        assert self.may_pause or self.servers.mode is None, f"nobody has asked for a pause: {self.servers.mode}"
        for number, worker in self.running.items():
            gate = worker.gate
            held = gate.state.held, gate.state.paused is not None
            assert held == (self.servers.mode is not None,) * 2, f"worker {number}: {held}, {self.servers.mode}"
            if first.follower.last is not None:
                assert worker.engine.common() == first.engine.common(), f"worker {number} has older news"


class _Peers(Peers):
    """The calls of one worker to the others, which are cancelled there when it dies."""

    def __init__(self, world: World, workers: dict[int, Worker], number: int) -> None:
        super().__init__(workers, number)
        self._world, self._me = world, workers[number]

    async def ask_all(self, step: str, *arguments: Any) -> list[Any]:
        if self._me.engine.dead:
            raise asyncio.CancelledError
        return await super().ask_all(step, *arguments)

    async def _ask(self, number: int, step: str, *arguments: Any) -> Any:
        delivery = asyncio.create_task(self._delivered(number, step, pickle.dumps(arguments)))
        try:
            return await asyncio.shield(delivery)
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(self._world.random.uniform(0.0, _ARRIVES_S), delivery.cancel)
            raise

    async def _delivered(self, number: int, step: str, sent: bytes) -> Any:
        await self._world.some_time(_ARRIVES_S)
        worker = self._workers.get(number)
        if worker is None:
            raise Unreachable("the worker is dead")
        answering = asyncio.create_task(worker.answer(step, *pickle.loads(sent)))
        try:
            while not answering.done():
                await asyncio.wait([answering], timeout=_ARRIVES_S)
                if self._workers.get(number) is not worker:
                    raise Unreachable("the worker has died")
        finally:
            answering.cancel()
        await self._world.some_time(_ARRIVES_S)
        return pickle.loads(pickle.dumps(answering.result()))


async def _administer(world: World, server: _Server, rounds: int) -> None:
    admin = server.admin
    for _ in range(rounds):
        await world.some_time(0.3)
        mode = world.random.choice(list(PauseMode))
        if world.random.random() < 0.4:
            await admin.update_weights("w", None, mode)
            continue
        server.may_pause = True
        await admin.pause(mode)
        await world.some_time(0.3)
        if world.random.random() < 0.3:
            await admin.update_weights("w", None, mode)
        await admin.resume()
        server.may_pause = False


@scenario
async def leader_restarts(world: World) -> None:
    """Whenever the leader dies, its successor ends what it began: all workers know what holds, and every turn ends."""
    server = _Server(world, world.random.randrange(2, 5))
    for number in range(server._count):
        await server.start(number)

    async def caller(number: int) -> None:
        for part in range(3):
            await world.some_time(1.0)
            request = asking(f"{number}.{part}", world.random.randrange(1, 30), start=40 + number)
            worker = server.running[world.random.randrange(1, server._count)]
            assert list((await worker.gate.read(request)).ids) == uninterrupted(request)

    async def leads() -> None:
        for _ in range(world.random.randrange(1, 4)):
            server.administers = asyncio.create_task(_administer(world, server, 3))
            await world.some_time(2.0)
            await server.kill(LEADER)
            await server.start(LEADER)
            await world.some_time(1.0)
            await asyncio.sleep(1.0)
            server.check()
            await server.admin.resume()
            server.may_pause = False
        server.administers = None
        await _administer(world, server, 1)
        server.check()

    await world.all(*(caller(number) for number in range(3)), leads())
    for gate in (worker.gate for worker in server.running.values()):
        assert gate.running == gate.waiting == 0 and not gate.state.held and not gate._flights
