"""Several servers on one database, as behind a load balancer: whichever a call reaches, its effect is there once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from tests.torture.asking import Asker, Reply
from tests.torture.callers import Caller
from tests.torture.runs import World, scenario
from tests.torture.scenarios.claims import claimed
from tests.torture.scenarios.turns import Agents
from tests.torture.sites import Called, Site, check_database
from tests.torture.wire import Exchange

_MOST_LIVE = 2
_IDLE_S = 3.0


class Replicas(Called):
    """Two servers; a call reaches either of them."""

    def __init__(self, world: World, **settings: Any) -> None:
        self._world = world
        self.sites = [Site(world, replicas=2, shutdown_timeout_s=0.5, **settings) for _ in range(2)]

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run all of them; then see that the database is sound."""
        async with AsyncExitStack() as stack:
            for site in self.sites:
                await stack.enter_async_context(site.running())
            yield
        check_database(self._world)

    async def call(
        self, method: str, path: str, body: Any = None, *, leave: float = 0.0, number: int | None = None, **headers: str
    ) -> Exchange | None:
        site = self._world.random.choice(self.sites)
        return await site.call(method, path, body, leave=leave, number=number, **headers)

    async def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        return await self._world.random.choice(self.sites).ok(method, path, body, **headers)

    async def check_stored(self, session: str, answered: Mapping[int, set[str]], *, once: bool = True) -> None:
        """Whoever is asked says the same."""
        for site in self.sites:
            await site.check_stored(session, answered, once=once)

    async def mishaps(self) -> None:
        """One of them restarts, or forgets what nobody uses."""
        for _ in range(self._world.random.randrange(3)):
            await self._world.some_time(0.7)
            site = self._world.random.choice(self.sites)
            if self._world.random.random() < 0.5:
                site.forget_idle()
            else:
                await site.restarts()


@scenario
async def replicas_of_turns(world: World) -> None:
    """Turns at all servers: each answer is stored once, and each turn of a client that waits is sampled once."""
    replicas = Replicas(world)
    patient = world.random.random() < 0.5  # who leaves may be answered by another server meanwhile
    keyed = not patient or world.random.random() < 0.5
    agents = Agents(world, replicas, once=patient, twice=0.0 if patient else 0.2, keyed=keyed)
    leave, sessions = 0.0 if patient else 0.3, world.random.choice([1, 2])
    async with replicas.running():
        await world.all(
            *(agents.play(f"s{number % sessions}", world.random.randrange(1, 4), leave=leave) for number in range(3)),
            *([] if patient else [replicas.mishaps()]),
        )
        await agents.check()


@scenario
async def replicas_of_trainers(world: World) -> None:
    """Sessions end at any server, and trainers claim and acknowledge at any."""
    replicas = Replicas(world)
    async with replicas.running():
        await claimed(world, replicas, replicas.mishaps())


class _Starts:
    """Environments that start and end sessions at all servers. `answers`: who got which session."""

    def __init__(self, world: World, site: Called) -> None:
        self._world, self._site = world, site
        self._live: set[str] = set()
        self.answers = Counter[str]()
        self.keys = Counter[str]()

    async def play(self, body: Mapping[str, Any], refused: tuple[int, ...] = ()) -> None:
        """Start a session, and end it or not."""
        await self._world.some_time(0.5)
        caller = Caller(self._world, self._site, leave=0.3)
        answer = await caller.call("POST", "/rl/start_session", body, refused=refused)
        if answer.status != 200:
            return
        name = answer.body["session_id"]
        self.answers[name] += 1
        self._live.add(name)
        assert len(self._live) <= _MOST_LIVE, f"more sessions live than may: {self._live}"
        await self._world.some_time(0.5)
        self._live.discard(name)
        await caller.ok("POST", f"/{name}/rl/end_session", {"outcome": "Finished"})


@scenario
async def replicas_of_starts(world: World) -> None:
    """A session that is started at several servers is one, numbers differ, and no limit is exceeded together."""
    replicas = Replicas(world, max_live_sessions=_MOST_LIVE)
    starts = _Starts(world, replicas)
    async with replicas.running():
        await world.all(
            *(starts.play({"session_id": "same"}, refused=(400,)) for _ in range(2)),
            *(starts.play({"task_id": "t"}) for _ in range(3)),
            replicas.mishaps(),
        )
        assert starts.answers["same"] == 1, f"{starts.answers['same']} environments started one session"
        assert set(starts.answers.values()) == {1}, f"one session was given to several: {starts.answers}"
        listed = (await replicas.ok("GET", "/rl/sessions"))["sessions"]
        assert Counter(each["session_id"] for each in listed) == starts.answers, "sessions are left or lost"
        assert {each["status"] for each in listed} == {"ended"}


async def _busy(world: World, asker: Asker, name: str, replies: list[Reply]) -> None:
    """An agent that does not pause for long, but whose turns may take long."""
    for _ in range(world.random.randrange(1, 3)):
        await world.some_time(0.5)
        reply = await asker.ask(f"/{name}", refused=(403,))
        assert reply is not None and reply.status == 200, f"{name} expired while it was used"
        replies.append(reply)


@scenario
async def replicas_expire_sessions(world: World) -> None:
    """A session does not expire at one server while a turn of it runs at another."""
    world.loop.stall = 0.0  # a machine that hangs for longer lets every session expire
    replicas = Replicas(world, session_idle_s=_IDLE_S, tick_s=world.random.choice([0.01, 0.3]))
    asker = Asker(world, replicas, most_tokens=40, leave=0.0)
    answered: dict[str, list[Reply]] = {f"s{number}": [] for number in range(2)}
    async with replicas.running():
        await world.all(*(_busy(world, asker, name, replies) for name, replies in answered.items()))
        for name, replies in answered.items():
            await replicas.check_stored(name, {reply.seed: {reply.id} for reply in replies})
        await asyncio.sleep(3 * _IDLE_S)
        listed = (await replicas.ok("GET", "/rl/sessions"))["sessions"]
        assert {each["status"] for each in listed} == {"expired"}, listed
