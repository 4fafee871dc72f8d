"""A database that goes away and comes back: what was answered is stored once, and everybody is answered."""

from __future__ import annotations

from typing import Any

from tests.torture.callers import Caller
from tests.torture.outages import Link
from tests.torture.runs import World, scenario
from tests.torture.scenarios.claims import claimed
from tests.torture.scenarios.turns import Agents
from tests.torture.sites import Site, check_database
from tests.torture.wire import Exchange

_PATIENT_S = 100.0
"""Longer than the database is ever away."""


class _Postgres(Site):
    """A server whose writer takes its database for PostgreSQL. `refused`: how many requests got 503."""

    def __init__(self, world: World, **settings: Any) -> None:
        super().__init__(world, **settings)
        self.refused = 0

    async def start(self, number: int = 0) -> None:
        await super().start(number)
        self.apps[number].state.store.database.write._sqlite = False

    async def call(self, *given: Any, **named: Any) -> Exchange | None:
        exchange = await super().call(*given, **named)
        self.refused += exchange is not None and exchange.status == 503
        return exchange


async def _grant(world: World, caller: Caller) -> int:
    """Grant starts; return how many."""
    granted = 0
    for _ in range(world.random.randrange(1, 5)):
        await world.some_time(1.0)
        number = world.random.randrange(1, 5)
        await caller.ok("POST", "/rl/grant_capacity", {"n": number})
        granted += number
    return granted


@scenario
async def database_away(world: World) -> None:
    """Turns and control calls that were answered are done once; with patience nobody is refused."""
    wait_s = world.random.choice([0.0, 1.0, _PATIENT_S])
    site, link = _Postgres(world, database_wait_s=wait_s), Link(world)
    agents, caller = Agents(world, site), Caller(world, site)
    with link.used():
        async with site.running():
            *_, granted, more = await world.all(
                link.outages(),
                *(agents.play(f"s{number}", world.random.randrange(1, 4)) for number in range(2)),
                _grant(world, caller),
                _grant(world, caller),
            )
            left = (await site.ok("POST", "/rl/grant_capacity", {"n": 1}))["capacity"]
            assert left == granted + more + 1, f"{granted + more} starts were granted, {left - 1} are left"
            assert not site.refused or wait_s < _PATIENT_S, "a call was refused although the database came back"
            await agents.check()
    check_database(world)


@scenario
async def database_away_from_trainers(world: World) -> None:
    """Sessions are started, ended, claimed and acknowledged once each."""
    site, link = _Postgres(world, database_wait_s=world.random.choice([0.0, 1.0, _PATIENT_S])), Link(world)
    with link.used():
        async with site.running():
            await claimed(world, site, link.outages())
    check_database(world)
