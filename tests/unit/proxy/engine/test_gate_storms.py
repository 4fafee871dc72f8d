"""Random pauses, updates, lost servers and cancelled requests: no token is lost, repeated or given a wrong version."""

from __future__ import annotations

import asyncio
import contextlib
import random

import pytest

from proxy.engine.interface import PauseMode
from tests.engines.gates import AdminGate
from tests.unit.proxy.engine.gated import HoldingEngine, PooledEngine, asking, gate_of, uninterrupted
from tests.wide import first
from tokengrove.errors import EngineUnavailable

STORMS = 24
OUTAGES = 8


async def disturb(gate: AdminGate, dice: random.Random) -> None:
    """Do one random operation of a trainer."""
    mode = dice.choice(list(PauseMode))
    match dice.randrange(5):
        case 0:
            await gate.admin.pause(mode)
        case 1:
            with contextlib.suppress(EngineUnavailable):  # memory is released
                await gate.admin.resume()
        case 2:
            await gate.admin.update_weights("/weights", None, mode)
        case 3:
            await gate.admin.release_memory(dice.choice([(), ("weights",), ("kv_cache",)]), PauseMode.ABORT)
        case _:
            await gate.admin.resume_memory(dice.choice([(), ("weights",), ("kv_cache",)]))


async def storm(gate: AdminGate, dice: random.Random) -> None:
    """Do random operations, some concurrently; in the end, resume the engine."""
    for _ in range(12):
        await asyncio.sleep(dice.choice([0.0, 0.001, 0.004]))
        await asyncio.gather(*(disturb(gate, dice) for _ in range(dice.choice([1, 1, 2]))))
    await gate.admin.resume_memory(())
    await gate.admin.resume()


async def visit(gate: AdminGate, dice: random.Random, name: str, constrained: bool) -> None:
    """Run a request and check its tokens, or cancel it halfway."""
    await asyncio.sleep(dice.random() * 0.02)
    request = asking(name, dice.randrange(1, 40), start=dice.randrange(500), constrained=constrained)
    task = asyncio.create_task(gate.read(request))
    if dice.random() < 0.2:
        await asyncio.wait([task], timeout=dice.random() * 0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return
    reply = await task
    assert reply.ids == uninterrupted(request)
    assert reply.versions == sorted(reply.versions)


@pytest.mark.parametrize("seed", first(range(STORMS), 8))
async def test_a_storm_changes_no_reply(seed: int) -> None:
    dice = random.Random(seed)
    engine = HoldingEngine()
    gate = gate_of(engine)
    deadly = bool(seed % 2)  # a constrained output fails with its server, so only the other half has some
    engine.deaths = [dice.choice([-1, -1, 0, 3]) for _ in range(8)] if deadly else []
    visits = [
        visit(gate, random.Random(1000 * seed + n), f"v{n}", constrained=not deadly and n % 4 == 0) for n in range(10)
    ]
    async with asyncio.timeout(30):
        await asyncio.gather(storm(gate, dice), *visits)
    assert (gate.running, gate.waiting, engine.running, engine.trespassers) == (0, 0, [], [])
    assert gate.state.paused is None and engine.held == {"weights", "kv_cache", "cuda_graph"}


@pytest.mark.parametrize("seed", first(range(OUTAGES), 3))
async def test_outages_between_pauses_and_updates_change_no_reply(seed: int) -> None:
    dice = random.Random(seed)
    engine = PooledEngine()
    gate = gate_of(engine)
    visits = [visit(gate, random.Random(1000 * seed + n), f"v{n}", constrained=False) for n in range(10)]

    async def weather() -> None:
        for _ in range(4):  # a request may lose five servers
            await asyncio.sleep(dice.choice([0.001, 0.004, 0.01]))
            engine.fall()
            if dice.random() < 0.5:
                await gate.admin.pause(dice.choice([PauseMode.ABORT, PauseMode.IN_PLACE, PauseMode.RETRACT]))
            await asyncio.sleep(dice.choice([0.0, 0.004]))
            if dice.random() < 0.5:
                await gate.admin.update_weights("/weights", None, PauseMode.ABORT)
            operations = [engine.rise, None]
            dice.shuffle(operations)
            for operation in operations:
                await asyncio.sleep(0.001)
                if operation is None:
                    await gate.admin.resume()
                else:
                    operation()

    async with asyncio.timeout(30):
        await asyncio.gather(weather(), *visits)
    assert (gate.running, gate.waiting, engine.running, engine.trespassers) == (0, 0, [], [])
