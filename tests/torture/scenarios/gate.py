"""Requests through the gate, while pauses, weight updates, deaths of servers and silence come at every moment."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from proxy.engine.chunks import TakeChunk
from proxy.engine.contract import CollectedReply
from proxy.engine.interface import PauseMode
from proxy.engine.requests import Failure, GenerateRequest
from proxy.engine.scripted.scripts import Fault, Reply, Script
from tests.engines.gates import AdminGate
from tests.torture.runs import World, scenario
from tests.unit.proxy.engine.gated import PooledEngine, asking, gate_of, uninterrupted
from tokengrove.errors import EngineTimeout, EngineUnavailable
from tokengrove.reasons import FinishReason

_TIMEOUT_S = 30.0


class _Servers(PooledEngine):
    """Two servers, of which one may be silent: a request that it got is given up and goes on at the other.

    `silences`: how many of the next requests get no token.
    """

    def __init__(self, tick_s: float = 0.01) -> None:
        super().__init__(tick_s)
        self.silences, self.elsewhere = 0, True
        self.silenced = Counter[str]()
        self.script = self._scripted(self.script)

    def has_other(self, failures: Sequence[Failure]) -> bool:
        return self.elsewhere

    def _scripted(self, script: Script) -> Script:
        def scripted(request: GenerateRequest) -> Reply:
            reply = script(request)
            if self.silences:
                self.silences -= 1
                self.silenced[request.request_id] += 1
                return replace(reply, fault=Fault.HANG)
            return reply

        return scripted


class _Gate(AdminGate):
    """Looks whether requests reach the engine while they are held. `holding`: a pause is about to begin."""

    def __init__(self, engine: _Servers, **settings: Any) -> None:
        super().__init__(engine, **settings)
        self.holding = False
        sample = self._sample

        async def watched(request: GenerateRequest, take: TakeChunk) -> FinishReason | None:
            assert not self.holding, "a request was let in while a pause begins"
            return await sample(request, take)

        self._sample = watched

    async def hold(self, mode: PauseMode) -> None:
        self.holding = True
        try:
            await super().hold(mode)
        finally:
            self.holding = False


async def _pauses(world: World, gate: AdminGate, rounds: int) -> None:
    """Pause in all modes, for longer than any timeout for a token, with weight updates."""
    for _ in range(rounds):
        await world.some_time(2.0)
        mode = world.random.choice(list(PauseMode))
        if world.random.random() < 0.3:
            await gate.admin.update_weights("w", None, mode)
            continue
        await gate.admin.pause(mode)
        await asyncio.sleep(world.random.choice([0.0, 0.5, 3 * _TIMEOUT_S]))
        if world.random.random() < 0.5:
            await gate.admin.update_weights("w", None, mode)
        await gate.admin.resume()


@scenario
async def gate_pauses(world: World) -> None:
    """A pause fails no request, however long it is, and each request gets the tokens that it would get without."""
    engine = _Servers(world.random.choice([0.01, 1.0]))
    gate = _Gate(engine, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)

    async def caller(number: int) -> None:
        await world.some_time(5.0)
        request = asking(str(number), world.random.randrange(1, 80), start=40 + number)
        reply = CollectedReply()

        async def sampled() -> FinishReason:
            finish, me = await gate.sample(request, reply.add), asyncio.current_task()
            assert me is not None and not me.cancelling(), "it counts as cancelled"
            return finish

        try:
            finish = await world.abandon_some(sampled(), 2.0, chance=0.2)
        except EngineTimeout:
            assert engine.silenced[request.request_id] == 2, "only a second silence fails a request"
            return
        if finish is not None:
            assert list(reply.ids) == uninterrupted(request)
            assert list(reply.versions) == sorted(reply.versions)

    async def deaths() -> None:
        for _ in range(world.random.randrange(3)):
            await world.some_time(3.0)
            if world.random.random() < 0.5:
                engine.silences += 1
            else:
                engine.fall()
                await world.some_time(1.0)
                engine.rise()

    await world.all(*(caller(number) for number in range(5)), _pauses(world, gate, 3), deaths())
    assert gate.running == gate.waiting == 0 and not gate.state.held and gate.state.paused is None and not gate._flights
    assert not engine.trespassers and not engine.running
    engine.silences = 0
    await gate.read(asking("last", 3))


@scenario
async def gate_pauses_as_timeouts_end(world: World) -> None:
    """A pause that begins at the moment at which silent servers are given up fails no request of another server."""
    engine = _Servers(1.0)
    gate = gate_of(engine, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)
    engine.silences = world.random.randrange(1, 4)

    async def caller(number: int) -> None:
        await world.some_time(1.0)
        request = asking(str(number), 80, start=40 + number)
        reply = await gate.read(request)
        assert list(reply.ids) == uninterrupted(request)

    async def pause() -> None:
        for _ in range(world.random.randrange(1, 4)):  # the first timeouts to end may be of servers that answered
            await world.until(lambda: gate._alarm is not None)
            assert gate._alarm is not None
            await asyncio.sleep(gate._alarm.when() - world.loop.time())
        await world.some_time(0.0)
        await gate.admin.pause(world.random.choice([PauseMode.IN_PLACE, PauseMode.RETRACT]))
        await asyncio.sleep(3 * _TIMEOUT_S)
        await gate.admin.resume()

    await world.all(*(caller(number) for number in range(5)), pause())
    assert gate.running == gate.waiting == 0 and gate.state.paused is None and not gate._flights


@scenario
async def gate_timeouts_and_cancellations(world: World) -> None:
    """Who is cancelled ends at once, also if he is given up for another server at the same moment."""
    engine = _Servers(1.0)
    gate = gate_of(engine, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)
    engine.silences = world.random.randrange(1, 4)
    calls = [asyncio.create_task(gate.read(asking(str(number), 80, start=40 + number))) for number in range(4)]
    for _ in range(world.random.randrange(1, 4)):
        await world.until(lambda: gate._alarm is not None)
        assert gate._alarm is not None
        await asyncio.sleep(gate._alarm.when() - world.loop.time())
    await world.some_time(0.0)
    for call in world.random.sample(calls, 2):
        if call.cancel():
            await asyncio.wait([call], timeout=5.0)
            assert call.done(), "who was cancelled goes on"
    for result in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(result, CollectedReply | asyncio.CancelledError), result
    assert gate.running == gate.waiting == 0 and not gate._flights and not engine.running


@scenario
async def gate_pauses_that_are_given_up(world: World) -> None:
    """A pause that is cancelled as it begins holds nobody, and the next one begins anew."""
    engine = _Servers(world.random.choice([0.01, 1.0]))
    gate = _Gate(engine, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)

    async def caller(number: int) -> None:
        await world.some_time(2.0)
        request = asking(str(number), world.random.randrange(1, 40), start=40 + number)
        reply = await gate.read(request)
        assert list(reply.ids) == uninterrupted(request)

    async def pauses() -> None:
        for _ in range(3):
            await world.some_time(2.0)
            pausing = asyncio.create_task(gate.admin.pause(world.random.choice([PauseMode.DRAIN, PauseMode.ABORT])))
            await world.some_time(2.0)
            if not pausing.cancel():
                await pausing
                await gate.admin.resume()
                continue
            with suppress(asyncio.CancelledError):
                await pausing
                await gate.admin.resume()
            await gate.admin.resume()
            assert not gate.state.held and gate.state.paused is None, "a pause that was given up holds requests"

    await world.all(*(caller(number) for number in range(5)), pauses())
    assert gate.running == gate.waiting == 0 and not gate.state.held and not engine.trespassers


@scenario
async def gate_drains_with_a_hung_turn(world: World) -> None:
    """A drain ends although a request hangs: its timeout runs on, and those that go on are not touched."""
    engine = _Servers()
    engine.elsewhere = False
    gate = gate_of(engine, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)
    engine.silences = hung = world.random.randrange(1, 3)

    async def caller(number: int) -> str:
        request = asking(str(number), world.random.randrange(1, 80), start=40 + number)
        try:
            reply = await gate.read(request)
        except EngineTimeout:
            return "timeout"
        assert list(reply.ids) == uninterrupted(request)
        return "whole"

    calls = asyncio.create_task(world.all(*(caller(number) for number in range(4))))
    await world.some_time(1.0)
    await world.until(lambda: not engine.silences)
    await gate.admin.pause(PauseMode.DRAIN)
    assert gate.state.paused is PauseMode.DRAIN and gate.running == 0
    await asyncio.sleep(2 * _TIMEOUT_S)
    await gate.admin.resume()
    assert sorted(await calls).count("timeout") == hung


@scenario
async def gate_shuts_down(world: World) -> None:
    """On shutdown whoever waits is sent away, whatever holds him, and whoever samples goes on."""
    engine = _Servers()
    gate = gate_of(engine, engine_timeout_s=_TIMEOUT_S, pause_timeout_s=100_000.0)

    async def caller(number: int) -> None:
        await world.some_time(2.0)
        request = asking(str(number), 40, start=40 + number)
        try:
            reply = await gate.read(request)
        except EngineUnavailable:
            return
        assert list(reply.ids) == uninterrupted(request)

    async def stop() -> None:
        await world.some_time(2.0)
        gate.send_away()

    async def fall() -> None:
        await world.some_time(2.0)
        engine.fall()

    await world.all(*(caller(number) for number in range(5)), stop(), fall())
    assert gate.running == gate.waiting == 0 and not gate._flights
