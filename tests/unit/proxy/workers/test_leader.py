"""What the leading worker tells the others, whichever of its calls arrive first."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.engine.interface import PauseMode
from proxy.telemetry.groups import EngineMetrics
from proxy.workers.leader import Follower, Gates, Leader, LeaderState
from tests.engines.gates import AdminGate
from tests.support import until
from tests.unit.proxy.engine.gated import WatchfulEngine, asking


class Engine(WatchfulEngine):
    """Adopts once `ready` is set; `adopted`: what it has adopted, `adopting`: how many times it has begun to."""

    def __init__(self) -> None:
        super().__init__()
        self.ready, self.adopting = asyncio.Event(), 0
        self.adopted: list[Mapping[str, Any]] = []
        self.ready.set()

    async def adopt(self, common: Mapping[str, Any]) -> None:
        self.adopting += 1
        await self.ready.wait()
        self.adopted.append(common)
        await super().adopt(common)


class Worker:
    """A worker that follows."""

    def __init__(self) -> None:
        self.engine = Engine()
        self.gate = AdminGate(self.engine)
        self.follower = Follower(self.engine, self.gate)

    async def answer(self, step: str, *arguments: Any) -> Any:
        of_gate = step in ("hold", "let_in", "until_idle", "load")
        return await getattr(self.gate if of_gate else self.follower, step)(*arguments)


@dataclass
class Call:
    """A call to the worker that follows. It arrives once `arrives` is set."""

    step: str
    arrives: asyncio.Event = field(default_factory=asyncio.Event)


class Road:
    """The peers of a leader with one follower. While `slow`, `sent` calls arrive when the test says so."""

    def __init__(self, worker: Worker) -> None:
        self._worker, self.slow = worker, False
        self.sent: list[Call] = []

    async def ask_all(self, step: str, *arguments: Any) -> list[Any]:
        call = Call(step)
        if self.slow:
            self.sent.append(call)
            await call.arrives.wait()
        return [await self._worker.answer(step, *arguments)]

    async def next(self, step: str, count: int = 1) -> Call:
        """Wait until the call of `step` is on its way, the last of `count` ones."""
        await until(lambda: [call.step for call in self.sent].count(step) == count)
        return [call for call in self.sent if call.step == step][-1]


class Answers:
    """The peers of a worker that starts: all of them know `told`."""

    def __init__(self, *told: LeaderState) -> None:
        self._told = told

    async def ask_all(self, step: str) -> list[LeaderState]:
        assert step == "latest"
        return list(self._told)


async def test_news_of_servers_sent_as_a_pause_ends_leave_no_worker_paused() -> None:
    engine, other = Engine(), Worker()
    gate, road = AdminGate(engine), Road(other)
    peers: Any = road
    leader = Leader(engine, Gates(gate, peers), Follower(engine, gate), peers, EngineMetrics())
    await leader.admin.pause(PauseMode.IN_PLACE)
    assert other.gate.state.held and other.gate.state.paused is PauseMode.IN_PLACE
    road.slow = True
    resuming = asyncio.create_task(leader.admin.resume())
    (await road.next("load")).arrives.set()
    resumed = await road.next("adopt")
    joining = asyncio.create_task(leader.tell_servers())  # the engine runs, and no gate has been let in yet
    joined = await road.next("adopt", 2)
    resumed.arrives.set()
    (await road.next("let_in")).arrives.set()
    await resuming
    joined.arrives.set()
    await joining
    assert not gate.state.held and gate.state.paused is None
    assert not other.gate.state.held and other.gate.state.paused is None


def told(number: int, mode: PauseMode | None = None) -> LeaderState:
    return LeaderState(number, mode, {**WatchfulEngine().common(), "version": number})


async def test_older_news_are_not_taken_over_after_newer() -> None:
    worker = Worker()
    await worker.follower.adopt(told(2))
    await worker.follower.adopt(told(1, PauseMode.ABORT))
    assert [common["version"] for common in worker.engine.adopted] == [2]
    assert worker.follower.last == told(2) and not worker.gate.state.held


async def test_news_that_newer_ones_overtook_on_their_way_to_the_engine_end_with_the_newest() -> None:
    worker = Worker()
    worker.engine.ready.clear()
    older = asyncio.create_task(worker.follower.adopt(told(1, PauseMode.ABORT)))
    await until(lambda: worker.engine.adopting == 1)
    newer = asyncio.create_task(worker.follower.adopt(told(2)))
    await until(lambda: worker.follower.last == told(2))
    worker.engine.ready.set()
    await older
    assert [common["version"] for common in worker.engine.adopted] == [1, 2] and not worker.gate.state.held
    await newer
    assert [common["version"] for common in worker.engine.adopted] == [1, 2]


async def test_a_worker_that_catches_up_waits_for_news_that_it_still_takes_over() -> None:
    worker = Worker()
    worker.engine.ready.clear()
    adopting = asyncio.create_task(worker.follower.adopt(told(3)))
    await until(lambda: worker.engine.adopting == 1)
    peers: Any = Answers(told(2), told(3))
    catching_up = asyncio.create_task(worker.follower.catch_up(peers))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not catching_up.done()
    worker.engine.ready.set()
    await catching_up
    assert [common["version"] for common in worker.engine.adopted] == [3]
    await adopting


class Refusing:
    """Peers of which one cannot hold its gate."""

    def __init__(self) -> None:
        self.refused = asyncio.Event()

    async def ask_all(self, step: str, *arguments: Any) -> list[Any]:
        if step == "hold":
            self.refused.set()
            raise RuntimeError("this worker cannot hold its gate")
        return []


async def test_a_pause_that_another_worker_cannot_begin_holds_no_gate_later() -> None:
    gate = AdminGate(Engine())
    begun = asyncio.Event()
    running = asyncio.create_task(gate.read(asking("a", 60), begun))
    await begun.wait()
    peers: Any = Refusing()
    with pytest.raises(RuntimeError, match="cannot hold"):
        await Gates(gate, peers).hold(PauseMode.DRAIN)
    await running
    assert peers.refused.is_set()
    assert not gate.state.held and gate.state.paused is None
    assert await gate.read(asking("b", 5))
