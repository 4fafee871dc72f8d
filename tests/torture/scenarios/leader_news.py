"""Workers that follow one leader, whose news overtake each other, while workers die and are started again."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import Any

from proxy.engine.interface import PauseMode
from proxy.telemetry.groups import EngineMetrics
from proxy.workers.leader import LEADER, Gates, Leader
from proxy.workers.peers import Unreachable
from tests.torture.runs import World, scenario
from tests.torture.workers import Peers, Worker
from tests.unit.proxy.engine.gated import WatchfulEngine


class _Engine(WatchfulEngine):
    """`servers`: how many times servers came and left. To adopt takes time, as a new server has to be reached."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world
        self.servers = 0

    def common(self) -> dict[str, Any]:
        return {**super().common(), "servers": self.servers}

    async def adopt(self, common: Mapping[str, Any]) -> None:
        await self._world.some_time(0.2)
        before = self.servers, self._version
        self.servers = common["servers"]
        await super().adopt(common)
        assert (self.servers, self._version) >= before, f"older news were taken over: {before}, then {common}"


class _Peers(Peers):
    """The calls of one worker to the others: each takes its own time on the way there and back."""

    def __init__(self, world: World, workers: dict[int, Worker], number: int) -> None:
        super().__init__(workers, number)
        self._world = world

    async def _ask(self, number: int, step: str, *arguments: Any) -> Any:
        sent = pickle.dumps(arguments)
        await self._world.some_time(0.1)
        worker = self._workers.get(number)
        if worker is None:
            raise Unreachable("the worker is dead")
        result = await worker.answer(step, *pickle.loads(sent))
        await self._world.some_time(0.1)
        if self._workers.get(number) is not worker:
            raise Unreachable("the worker has died")
        return pickle.loads(pickle.dumps(result))


class _Workers:
    """The workers of a server, of which the first leads."""

    def __init__(self, world: World, count: int) -> None:
        self._world = world
        self._running = dict[int, Worker]()
        first = self._running[LEADER] = Worker(_Engine(world))
        peers: Any = _Peers(world, self._running, LEADER)
        gates = Gates(first.gate, peers)
        self.leader = first.leader = Leader(first.engine, gates, first.follower, peers, EngineMetrics())
        first.ready = True
        for number in range(1, count):
            self._running[number] = Worker(_Engine(world))
            self._running[number].ready = True

    async def restart(self) -> None:
        """Kill a worker that follows, and start it again."""
        number = self._world.random.choice([number for number in self._running if number != LEADER])
        del self._running[number]
        await self._world.some_time(0.3)
        worker = self._running[number] = Worker(_Engine(self._world))
        peers: Any = _Peers(self._world, self._running, number)
        await worker.follower.catch_up(peers)
        worker.ready = True

    async def add_server(self) -> None:
        """A server joins or leaves."""
        self._running[LEADER].engine.servers += 1
        await self.leader.tell_servers()

    def check_held(self) -> None:
        """Raise AssertionError unless the gates of all workers hold new requests."""
        let = [number for number, worker in self._running.items() if worker.ready and not worker.gate.state.held]
        assert not let, f"the workers {let} let requests into a paused engine"

    def check_equal(self) -> None:
        """Raise AssertionError unless all workers know the same."""
        first = self._running[LEADER]
        for number, worker in self._running.items():
            if first.follower.last is not None:
                assert worker.engine.common() == first.engine.common(), f"worker {number} has older news"
            held = worker.gate.state.held, worker.gate.state.paused
            assert held == (first.gate.state.held, first.gate.state.paused), f"the gate of worker {number} is {held}"


async def _engine_control(world: World, workers: _Workers) -> None:
    admin = workers.leader.admin
    for _ in range(world.random.randrange(1, 4)):
        await world.some_time(0.3)
        mode = world.random.choice(list(PauseMode))
        if world.random.random() < 0.4:
            await admin.update_weights("w", None, mode)
            continue
        await admin.pause(mode)
        workers.check_held()
        await world.some_time(0.3)
        if world.random.random() < 0.5:
            await admin.update_weights("w", None, mode)
            workers.check_held()
        await admin.resume()
    if world.random.random() < 0.3:
        await admin.pause(PauseMode.IN_PLACE)


@scenario
async def leader_news(world: World) -> None:
    """Whatever overtakes what, each worker ends with the newest state, and none lets requests into a paused engine."""
    workers = _Workers(world, world.random.randrange(2, 5))

    async def servers() -> None:
        for _ in range(world.random.randrange(5)):
            await world.some_time(0.3)
            await workers.add_server()

    async def restarts() -> None:
        for _ in range(world.random.randrange(2)):
            await world.some_time(1.0)
            await workers.restart()

    await world.all(_engine_control(world, workers), servers(), servers(), restarts())
    workers.check_equal()
