"""Placement of sessions on engine servers: how long a set of sessions takes, and how much the prefix caches save.

Sessions run on a virtual clock (`tests.bench.affinity_servers`), so a seed gives the same figures on every machine.
The rule of the proxy is that of `proxy.engine.servers.placement`; the others are what it was chosen against.

Run `python -m tests.bench.affinity --seed 1 2 3` from the root of the repository. It prints the distributions, the
seeds and a table: means over the seeds. No figure fails the bench.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from proxy.engine.requests import Failure
from proxy.engine.servers.placement import Member, SessionPlacement
from tests.bench.affinity_servers import Clock, Request, SimulatedServer, Speed
from tests.bench.affinity_sessions import Session, Step, drawn, recorded, turns_formula

SERVERS = 4
DOWN_S, EVERY_S = 60.0, 180.0
"""In an outage a server is away for `DOWN_S`; the next server follows `EVERY_S` after its death."""


class Policy(Protocol):
    """Chooses servers. `members` has the load, as the pool counts it."""

    def choose(self, request: Request, failures: Sequence[Failure]) -> Member: ...

    def done(self, request: Request, member: Member) -> None:
        """The request has ended."""

    def lost(self, member: Member) -> None:
        """The server has died."""

    def ended(self, session: str) -> None:
        """The session has ended."""


MakePolicy = Callable[[Sequence[Member], Callable[[], float]], Policy]


class Bare:
    """The part of an engine that placement uses."""

    def __init__(self, number: int) -> None:
        self.url = f"http://server-{number}"


class LeastLoaded:
    """No affinity: each request goes to the server with the fewest requests."""

    def __init__(self, members: Sequence[Member], clock: Callable[[], float]) -> None:
        """`clock`: the virtual time."""
        self.members = members

    def choose(self, request: Request, failures: Sequence[Failure]) -> Member:
        failed = {failure.url for failure in failures}
        candidates = [member for member in self.members if member.takes]
        return min([m for m in candidates if m.url not in failed] or candidates, key=lambda m: (m.in_flight, m.served))

    def done(self, request: Request, member: Member) -> None: ...

    def lost(self, member: Member) -> None: ...

    def ended(self, session: str) -> None: ...


class Sticky(LeastLoaded):
    """The former rule of the proxy: a session stays unless its server has over 32 requests more than another one,
    and over 1.5 times as many. New sessions go to the server with the fewest requests."""

    def __init__(self, members: Sequence[Member], clock: Callable[[], float]) -> None:
        super().__init__(members, clock)
        self._homes: dict[str, Member] = {}

    def choose(self, request: Request, failures: Sequence[Failure]) -> Member:
        home = self._homes.get(request.session)
        if home is None or failures or not home.takes or self._crowded(home):
            home = self._homes[request.session] = super().choose(request, failures)
        return home

    def _crowded(self, home: Member) -> bool:
        least = min(member.in_flight for member in self.members if member.takes)
        return home.in_flight > max(least + 32, least * 1.5)


class CacheAware(LeastLoaded):
    """The rule of SGLang's router, with its cache_threshold 0.5, balance_abs_threshold 32, balance_rel_threshold 1.5.

    While servers are balanced, a request goes to the server with the longest known prefix if that is over half of the
    prompt, else to the server with the fewest known tokens. Otherwise it goes to the server with the fewest requests.
    The router does not see what servers evict.
    """

    def __init__(self, members: Sequence[Member], clock: Callable[[], float]) -> None:
        super().__init__(members, clock)
        self._known: dict[str, dict[str, int]] = defaultdict(dict)

    def choose(self, request: Request, failures: Sequence[Failure]) -> Member:
        chosen = self._choose(request, failures)
        known = self._known[chosen.url]
        known[request.group] = request.shared
        known[request.chain] = request.prompt - request.shared
        return chosen

    def _choose(self, request: Request, failures: Sequence[Failure]) -> Member:
        failed = {failure.url for failure in failures}
        takes = [m for m in self.members if m.takes]
        takes = [m for m in takes if m.url not in failed] or takes
        loads = [m.in_flight for m in takes]
        if max(loads) - min(loads) > 32 and max(loads) > 1.5 * min(loads):
            return super().choose(request, failures)
        best = max(takes, key=lambda m: self._match(request, m))
        if self._match(request, best) > 0.5 * request.prompt:
            return best
        return min(takes, key=lambda m: sum(self._known[m.url].values()))

    def _match(self, request: Request, member: Member) -> int:
        known = self._known[member.url]
        return known.get(request.group, 0) + known.get(request.chain, 0)

    def lost(self, member: Member) -> None:
        self._known.pop(member.url, None)


class Proxy(LeastLoaded):
    """The rule of `proxy.engine.servers.placement`. `groups`: it is told the groups of the sessions."""

    groups = True

    def __init__(self, members: Sequence[Member], clock: Callable[[], float]) -> None:
        super().__init__(members, clock)
        self._placement = SessionPlacement(members, clock=clock)

    def choose(self, request: Request, failures: Sequence[Failure]) -> Member:
        group = request.group if self.groups else ""
        return self._placement.choose(request.session, failures, request.prompt + request.done, group)

    def done(self, request: Request, member: Member) -> None:
        self._placement.note_output(request.session, member, request.prompt + request.output)

    def lost(self, member: Member) -> None:
        self._placement.forget(member)

    def ended(self, session: str) -> None:
        self._placement.release(session)


class ProxyWithoutGroups(Proxy):
    """The same for sessions whose group the proxy does not know."""

    groups = False


@dataclass(frozen=True, slots=True)
class Result:
    """`turn_s`: mean seconds of a turn at the servers, queue included."""

    makespan_s: float
    hit_rate: float
    turn_s: float
    turns: int


class Run:
    """Sessions, at most `at_once`, on servers that a policy chooses. With `outages` servers die in turn, and return."""

    def __init__(
        self,
        sessions: Sequence[Session],
        make_policy: MakePolicy,
        at_once: int,
        speed: Speed,
        *,
        outages: bool,
    ) -> None:
        self._clock = Clock()
        self._members = [Member(Bare(number), alive=True) for number in range(SERVERS)]  # type: ignore[arg-type]
        self._servers = {member.url: SimulatedServer(self._clock, speed, self._done) for member in self._members}
        self._policy, self._backlog, self._at_once = (
            make_policy(self._members, lambda: self._clock.now),
            deque(sessions),
            at_once,
        )
        self._left, self._outages = len(sessions), outages
        self._where: dict[str, Member] = {}
        self._at: dict[str, tuple[Session, int]] = {}
        self._seconds: list[float] = []

    def play(self) -> Result:
        for _ in range(min(self._at_once, len(self._backlog))):
            self._start()
        if self._outages:
            self._clock.call_in(EVERY_S / 2, lambda: self._kill(0))
        self._clock.run(lambda: self._left > 0)
        assert not self._left
        prompt = sum(server.prompt_tokens for server in self._servers.values())
        cached = sum(server.cached_tokens for server in self._servers.values())
        return Result(self._clock.now, cached / prompt, statistics.fmean(self._seconds), len(self._seconds))

    def _start(self) -> None:
        if self._backlog:
            session = self._backlog.popleft()
            self._at[session.name] = session, 0
            self._ask(session.name)

    def _ask(self, name: str) -> None:
        session, index = self._at[name]
        step: Step = session.steps[index]
        chain = f"{name}/{step.part}"
        self._submit(
            Request(name, chain, f"group {session.group}", session.shared, step.prompt, step.output, self._clock.now)
        )

    def _submit(self, request: Request, failures: Sequence[Failure] = ()) -> None:
        member = self._where[request.session] = self._policy.choose(request, failures)
        member.in_flight += 1
        member.served += 1
        self._servers[member.url].submit(request)

    def _done(self, request: Request) -> None:
        member = self._where.pop(request.session)
        member.in_flight -= 1
        self._policy.done(request, member)
        self._seconds.append(self._clock.now - request.asked_at)
        session, index = self._at[request.session]
        if index + 1 < len(session.steps):
            self._at[session.name] = session, index + 1
            self._clock.call_in(session.steps[index + 1].tool_s, lambda: self._ask(session.name))
            return
        del self._at[session.name]
        self._policy.ended(session.name)
        self._left -= 1
        self._start()

    def _kill(self, number: int) -> None:
        member = self._members[number]
        member.alive = False
        self._policy.lost(member)
        for request in self._servers[member.url].die():
            member.in_flight -= 1
            self._submit(request, [Failure(member.url, "it died", self._clock.now, True, False)])
        self._clock.call_in(DOWN_S, lambda: self._return(member))
        self._clock.call_in(EVERY_S, lambda: self._kill((number + 1) % SERVERS))

    def _return(self, member: Member) -> None:
        member.alive = True


POLICIES: dict[str, MakePolicy] = {
    "least loaded": LeastLoaded,
    "sticky": Sticky,
    "cache-aware": CacheAware,
    "proxy, no groups": ProxyWithoutGroups,
    "proxy": Proxy,
}


@dataclass(frozen=True, slots=True)
class Workload:
    """`sessions`: makes them from a seed."""

    name: str
    sessions: Callable[[random.Random], list[Session]]
    at_once: int
    outages: bool = False


WORKLOADS = [
    Workload("32 turns, 128 at once", lambda rng: drawn(rng, 64, 32), 128),
    Workload("32 turns, 256 at once", lambda rng: drawn(rng, 64, 32), 256),
    Workload("80 turns, 128 at once", lambda rng: drawn(rng, 64, 80), 128),
    Workload("80 turns, 256 at once", lambda rng: drawn(rng, 64, 80), 256),
    Workload("recorded, 128 at once", lambda rng: recorded(rng, 200), 128),
    Workload("recorded, 512 at once", lambda rng: recorded(rng, 200), 512),
    Workload("one group, 256 at once", lambda rng: drawn(rng, 64, 32, one_prompt=20_000), 256),
    Workload("32 turns, 128, outages", lambda rng: drawn(rng, 64, 32), 128, outages=True),
    Workload("80 turns, 256, outages", lambda rng: drawn(rng, 64, 80), 256, outages=True),
]


def measure(workload: Workload, seed: int, policy: str, speed: Speed) -> Result:
    sessions = workload.sessions(random.Random(seed))
    return Run(sessions, POLICIES[policy], workload.at_once, speed, outages=workload.outages).play()


def row(workload: Workload, seeds: Sequence[int], speed: Speed) -> str:
    """A line of the table: of each policy the means over the seeds, and the shortest time in bold."""
    found = {name: [measure(workload, seed, name, speed) for seed in seeds] for name in POLICIES}
    times = {name: statistics.fmean(result.makespan_s for result in results) for name, results in found.items()}
    hits = {name: statistics.fmean(result.hit_rate for result in results) for name, results in found.items()}
    best = min(times.values())
    cells = [
        f"{f'**{times[name]:,.0f}**' if times[name] == best else f'{times[name]:,.0f}'} / {hits[name]:.2f}"
        for name in POLICIES
    ]
    turns = statistics.fmean(result.turns for result in found["proxy"])
    return f"| {' | '.join([workload.name, f'{turns:,.0f}', *cells])} |"


def main() -> None:
    parser = argparse.ArgumentParser(description="Placement of sessions on engine servers, simulated.")
    parser.add_argument("--seed", type=int, nargs="+", default=[1, 2, 3, 4, 5], help="one or more seeds")
    parser.add_argument("--prefill", type=float, default=Speed().prefill_per_s, help="tokens of a prompt per second")
    parser.add_argument("--capacity", type=int, default=Speed().capacity, help="tokens that a server has room for")
    arguments = parser.parse_args()
    speed = Speed(capacity=arguments.capacity, prefill_per_s=arguments.prefill)
    for mean in (32, 80):
        print(f"mean {mean}: {turns_formula(mean)}")
    print(f"{SERVERS} servers, {speed}; seeds {arguments.seed}; makespan in seconds / hit rate\n")
    print(f"| {' | '.join(['workload', 'turns', *POLICIES])} |\n|{'---|' * (2 + len(POLICIES))}")
    for workload in WORKLOADS:
        print(row(workload, arguments.seed, speed), flush=True)


if __name__ == "__main__":
    main()
