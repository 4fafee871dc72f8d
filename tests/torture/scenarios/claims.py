"""Trainers that share ended sessions: they race, die, are late and lose answers, while sessions end and some go.

Those that go are deleted or withdrawn.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.torture.callers import Answer, Caller
from tests.torture.runs import World, scenario
from tests.torture.seam import EPOCH_S
from tests.torture.sites import Called, Site, check_database

_SLACK_S = 1e-3
"""A Unix time in a double is no more exact than this."""
_END_S = 300.0


@dataclass(frozen=True)
class _Lease:
    claim: str
    since: float
    until: float


class _Book:
    """What trainers were told. `started`: the group of each session; `ended`, `gone`: when the answer came.

    `deleting`, `acknowledging`: the calls for these have been sent at least. Those of `withdrawn`, which are among
    `deleting` and `gone`, are still listed.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self.started: dict[str, str | None] = {}
        self.ended: dict[str, float] = {}
        self.deleting: set[str] = set()
        self.gone: dict[str, float] = {}
        self.withdrawn: set[str] = set()
        self._leases = defaultdict[str, list[_Lease]](list)
        self.acknowledging: set[str] = set()
        self.acknowledged: dict[str, _Lease] = {}
        self._claims: set[str] = set()
        self._lost: list[tuple[str, str | None]] = []

    @property
    def open(self) -> set[str]:
        """The ended sessions that nobody has acknowledged."""
        return self.ended.keys() - self.acknowledged.keys() - self.deleting

    def lease(self, claim: str, lease_s: float, answer: Answer) -> None:
        """Note what a claim got. Raises AssertionError if it may not have got it."""
        self._claims.add(claim)
        names = [session["session_id"] for session in answer.body["sessions"]]
        until = answer.body["lease_until"] - EPOCH_S if names else 0.0
        lease = _Lease(claim, until - lease_s, until)
        assert len(set(names)) == len(names)
        for name in names:
            assert name in self.started, f"nobody started {name}"
            done = self.acknowledged.get(name)
            assert done is None or done.until > answer.sent, f"{name} is acknowledged, and leased to {claim}"
            assert self.gone.get(name, answer.sent) >= answer.sent, f"{name} is gone, and is leased to {claim}"
            for other in self._leases[name]:
                apart = other.until <= lease.since + _SLACK_S or lease.until <= other.since + _SLACK_S
                assert apart or other.claim == claim, f"{name} is leased twice: {other}, {lease}"
            self._leases[name].append(lease)
        self._check_groups(set(names))

    def acknowledge(self, claim: str, asked: Sequence[str], answer: Answer) -> None:
        """Note what a claim has acknowledged."""
        done, lost = answer.body["acknowledged"], answer.body["lost"]
        assert set(done) | set(lost) == set(asked) and not set(done) & set(lost), answer.body
        for name in done:
            before = self.acknowledged.setdefault(name, _Lease(claim, answer.sent, answer.came))
            assert before.claim == claim, f"{name} was acknowledged by {before.claim} and by {claim}"
        self._lost += lost.items()

    def check(self) -> None:
        """Raise AssertionError unless each ended session that was not deleted was acknowledged once."""
        assert not self.open, f"nobody acknowledged {self.open}"
        for name, holder in self._lost:
            assert name in self.deleting if holder is None else holder in self._claims, f"{name} was lost to {holder}"

    def _check_groups(self, names: set[str]) -> None:
        members = defaultdict[str, set[str]](set)
        for name, group in self.started.items():
            if group is not None:
                members[group].add(name)
        for group, known in members.items():
            missing = known - names - self.deleting - self.acknowledging
            assert not names & known or not missing, f"group {group} is leased without {missing}"


class _Trainer:
    """Claims, trains and acknowledges until nothing is left."""

    def __init__(self, world: World, site: Called, book: _Book, name: str) -> None:
        self._world, self._book, self._name = world, book, name
        self._caller = Caller(world, site)
        self._claims = 0

    async def play(self, playing: Sequence[asyncio.Task[Any]]) -> None:
        """Work until those that play have ended and nothing is left."""
        while not all(task.done() for task in playing) or self._book.open:
            assert self._world.loop.time() < 1000.0 + _END_S, f"nobody gets {self._book.open}"
            await self._one_claim()

    async def _one_claim(self) -> None:
        random = self._world.random
        self._claims += 1
        claim, lease_s = f"{self._name}.{self._claims}", random.choice([0.2, 1.0, 5.0])
        body = {
            "claim_id": claim,
            "limit": random.choice([1, 2, 10]),
            "lease_s": lease_s,
            "wait_s": random.choice([0.0, 3.0]),
        }
        answer = await self._claim(body)
        held = [session["session_id"] for session in answer.body["sessions"]]
        if not held:
            return await asyncio.sleep(random.uniform(0.0, 0.5))
        if random.random() < 0.2:
            return None  # it dies: nobody acknowledges, and the lease runs out
        await asyncio.sleep(random.uniform(0.0, 1.3) * lease_s)
        if random.random() < 0.3:
            await self._claim({"claim_id": claim, "lease_s": lease_s, "renew": True})
            await self._world.some_time(lease_s)
        some = held if random.random() < 0.7 else held[: random.randrange(1, len(held) + 1)]
        await self._acknowledge(claim, some)
        return None

    async def _claim(self, body: Mapping[str, Any]) -> Answer:
        answer = await self._caller.call("POST", "/trajectories/claim", body, once=False)
        waited = answer.came - answer.sent
        self._book.lease(body["claim_id"], body["lease_s"], answer)
        assert waited < 120.0, f"a claim waited {waited} s"
        return answer

    async def _acknowledge(self, claim: str, names: Sequence[str]) -> None:
        self._book.acknowledging |= set(names)
        body = {"claim_id": claim, "session_ids": names}
        answer = await self._caller.call("POST", "/trajectories/acknowledge", body, once=False)
        self._book.acknowledge(claim, names, answer)


class _Environment:
    """Starts sessions, plays a turn or none, ends them, and deletes or withdraws some."""

    def __init__(self, world: World, site: Called, book: _Book) -> None:
        self._world, self._book = world, book
        self._caller = Caller(world, site)

    async def play(self, name: str, group: str | None, size: int) -> None:
        """One session of a group of so many."""
        world, caller, book = self._world, self._caller, self._book
        await world.some_time(3.0)
        grouped = {} if group is None else {"group_id": group, "group_size": size}
        book.started[name] = group
        await caller.ok("POST", "/rl/start_session", {"session_id": name, **grouped})
        if world.random.random() < 0.5:
            body = {"model": "m", "messages": [{"role": "user", "content": name}], "max_tokens": 3}
            await caller.ok("POST", f"/{name}/v1/chat/completions", body)
        await caller.ok("POST", f"/{name}/rl/end_session", {})
        book.ended[name] = world.loop.time()
        if group is None and world.random.random() < 0.2:
            await world.some_time(2.0)
            book.deleting.add(name)
            if world.random.random() < 0.5:
                book.withdrawn.add(name)
                await caller.ok("POST", f"/{name}/rl/withdraw_session", {})
            else:
                await caller.ok("DELETE", f"/rl/sessions/{name}")
            book.gone[name] = world.loop.time()


async def claimed(world: World, site: Called, *beside: Coroutine[Any, Any, None]) -> None:
    """Let environments end sessions and trainers share them, and run `beside`; see that each is trained once."""
    book, random = _Book(world), world.random
    environment = _Environment(world, site, book)
    sizes = [random.randrange(1, 4) for _ in range(2)]
    groups = [(None if size == 1 else f"g{number}", size) for number, size in enumerate(sizes)]
    playing = [
        asyncio.create_task(environment.play(f"s{number}.{member}", group, size))
        for number, (group, size) in enumerate(groups)
        for member in range(size)
    ]
    trainers = [_Trainer(world, site, book, f"t{number}") for number in range(random.randrange(1, 4))]
    await world.all(*(trainer.play(playing) for trainer in trainers), _all(playing), *beside)
    book.check()
    await _check_told(site, book)


async def _all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    await asyncio.gather(*tasks)


async def _check_told(site: Called, book: _Book) -> None:
    """The server says the same of the queue as the trainers."""
    listed = await site.ok("GET", "/rl/sessions")
    names = Counter(session["session_id"] for session in listed["sessions"])
    assert names == Counter(book.started.keys() - (book.gone.keys() - book.withdrawn)), names
    last = await site.ok("POST", "/trajectories/claim", {"limit": 10})
    assert last["sessions"] == [], "a session is left in the queue"


@scenario
async def claims_of_trainers(world: World) -> None:
    """Each ended session is held by one lease at a time, comes back when that runs out, and is acknowledged once."""
    site = Site(world, alone=world.random.random() < 0.5)
    async with site.running():
        await claimed(world, site)
    check_database(world)


@scenario
async def claims_and_restarts(world: World) -> None:
    """The same, while the server stops, claims that wait too, and starts again."""
    site = Site(world, alone=world.random.random() < 0.5, shutdown_timeout_s=0.5)
    async with site.running():
        await claimed(world, site, site.restarts())
    check_database(world)
