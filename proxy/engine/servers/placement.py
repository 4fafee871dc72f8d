"""Placement of requests: each goes to the server where it costs least, so that sessions stay while load allows.

The cost is in tokens of a prompt that a server has to compute: those of the prompt that the server does not hold, and
for its load `_PER_REQUEST` for each request in flight and `_PER_HELD` for each token of the sessions that it holds. So
a session moves once the difference in load outweighs what its server holds of it, and a new session prefers the server
that has the prompt of its group. What a server holds is an estimate: the proxy does not see what a server evicts.

No request goes to a server that is ejected or leaving. A server with an open breaker gets requests only if no other
server takes them. A server that has lost or failed a request and has sampled no token since is the last choice.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from proxy.engine.interface import EngineInfo
from proxy.engine.requests import Failure
from proxy.engine.servers.breaker import Breaker
from proxy.engine.servers.remote import RemoteEngine
from proxy.types import Sampler
from tokengrove.errors import EngineUnavailable

RETRY_AFTER_S = 5.0
_REMEMBERED_SESSIONS = 65_536

_PER_REQUEST = 128
"""A request in flight delays another one by about as much as computing this many tokens of a prompt: by 5 to 15 ms.
Simulated makespans (`tests.bench.affinity`) hardly change between 64 and 256."""

_PER_HELD = 1 / 32
"""Room for a prompt is taken from other sessions, which then miss it. Without this term, a server that returns empty
stays emptier than the others, since few sessions hold so little that they move; simulated outages then cost more."""

_HELD_S = 600.0
"""A session that nobody has used for so many seconds holds nothing. It may have ended at another worker or replica."""


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool.

    `alive`: it answers and has the pool's state. `paused`, `released`: the pool paused it, or released these kinds of
    its memory, and has not undone that yet, even if the server was restarted. `leaving`: it takes no new requests and
    is removed after its last one. `doubtful`: it answers, but has lost or failed a request, or joined during a pause,
    and has sampled no token since. `served`: the number of requests so far. `prompt_tokens`: of the requests for which
    the server has reported how many of them were in its prefix cache, the `cached_tokens`. `failure`: the reason why it
    is not alive or is doubtful, else "".
    """

    engine: RemoteEngine
    alive: bool = False
    paused: bool = False
    released: frozenset[str] = frozenset()
    leaving: bool = False
    doubtful: bool = False
    in_flight: int = 0
    served: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    failure: str = ""
    breaker: Breaker = field(default_factory=Breaker)
    _described: tuple[EngineInfo, Sampler] | None = None

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def sampler(self) -> Sampler:
        """What turns record of it."""
        info = self.engine.info()
        if self._described is None or self._described[0] is not info:
            self._described = info, Sampler(self.url, info.dtype, info.quantization)
        return self._described[1]

    @property
    def takes(self) -> bool:
        """True if the server takes new requests, possibly only while no other server does."""
        return self.alive and not self.leaving

    @property
    def sound(self) -> bool:
        """True if the server takes new requests even while other servers do."""
        return self.alive and not self.leaving and not self.breaker.open

    @property
    def state(self) -> str:
        """The state in one word, as `GET /engine/servers` shows it."""
        if self.leaving:
            return "leaving"
        if not self.alive:
            return "ejected"
        return "failing" if self.breaker.open else "alive"


_is_sound, _takes = attrgetter("sound"), attrgetter("takes")


def named_failure(url: str, why: str) -> str:
    """Return the failure `why`, prefixed with the server's URL unless it already contains the URL."""
    return why if url in why else f"{url}: {why}"


@dataclass(slots=True)
class _Home:
    """Where a session's last request went: the tokens of its prompt and output, the time, the version of its adapter.

    A server holds them for this adapter only.
    """

    member: Member
    tokens: int
    at: float
    adapter: int | None


@dataclass(slots=True)
class _Shared:
    """The prompt of a group: the least tokens that one of its requests had, and the servers that have got one."""

    tokens: int
    members: set[Member]
    at: float


class SessionPlacement:
    """Remembers the server of each session. `members`: the pool's own list, which changes at run time."""

    def __init__(
        self,
        members: Sequence[Member],
        remembered: int = _REMEMBERED_SESSIONS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._members, self._remembered, self._clock = members, remembered, clock
        self._homes: OrderedDict[str, _Home] = OrderedDict()
        self._groups: OrderedDict[str, _Shared] = OrderedDict()
        self._held: Counter[Member] = Counter()

    def choose(
        self,
        session_id: str,
        failures: Sequence[Failure] = (),
        prompt_tokens: int = 0,
        group_id: str = "",
        adapter: int | None = None,
    ) -> Member:
        """Choose the server for a request; `session_id` and `group_id` may be "". Raises EngineUnavailable.

        `failures`: the earlier failures of this request. Their servers are chosen only if there is no other; servers
        that lost the request are then preferred to servers that failed it. `adapter`: the version of its LoRA adapter,
        since no prefix is shared between adapters; None: the base model.
        """
        self._forget_unused()
        group_id = f"{group_id}@{adapter}" if group_id and adapter is not None else group_id
        home, shared = self._homes.get(session_id), self._groups.get(group_id)
        failed = {failure.url for failure in failures if not failure.lost} if failures else ()

        def preference(member: Member) -> tuple[bool, bool, float, int]:
            stays = home is not None and home.member is member and home.adapter == adapter
            held = home.tokens if home is not None and stays else 0
            if shared is not None and member in shared.members:
                held = max(held, shared.tokens)
            cost = _PER_REQUEST * member.in_flight + _PER_HELD * self._held[member] - min(held, prompt_tokens)
            return bool(failed) and member.url in failed, member.doubtful, cost, member.served

        only = self._members[0] if len(self._members) == 1 and not failures else None
        if only is not None and only.alive and not only.leaving and not only.breaker.open:
            servers = [only]
        else:
            servers = (self.untried(failures) if failures else []) or self.candidates()
        member = servers[0] if len(servers) == 1 else min(servers, key=preference)
        if session_id:
            self._remember(session_id, member, prompt_tokens, adapter)
        if group_id:
            self._share(group_id, member, prompt_tokens)
        return member

    def candidates(self) -> list[Member]:
        """Return the servers that take requests, at least one. Raises EngineUnavailable if there is none."""
        candidates = list(filter(_is_sound, self._members)) or list(filter(_takes, self._members))
        if not candidates:
            why = "; ".join(named_failure(m.url, m.failure) for m in self._members if m.failure) or "the pool is empty"
            raise EngineUnavailable(f"no engine server is available ({why})", retry_after_s=RETRY_AFTER_S)
        return candidates

    def untried(self, failures: Sequence[Failure]) -> list[Member]:
        """Return the servers that take requests and are not named in `failures`.

        Servers with an open breaker are returned only if there are no others.
        """
        urls = {failure.url for failure in failures}
        untried = [member for member in self._members if member.takes and member.url not in urls]
        return [member for member in untried if member.sound] or untried

    def note_output(self, session_id: str, member: Member, tokens: int, adapter: int | None = None) -> None:
        """Note that a request has ended at `member` with `tokens` of prompt and output.

        The session may have moved meanwhile, and is forgotten if the request took longer than `_HELD_S`.
        """
        home = self._homes.get(session_id)
        if session_id and member.alive and (home is None or home.member is member):
            self._remember(session_id, member, tokens, adapter)

    def release(self, session_id: str) -> None:
        """Forget a session that has ended. What it holds is no longer counted."""
        home = self._homes.pop(session_id, None)
        if home is not None:
            self._held[home.member] -= home.tokens

    def forget(self, *members: Member) -> None:
        """Forget what servers hold, which have left or have lost their cache."""
        for session_id in [name for name, home in self._homes.items() if home.member in members]:
            del self._homes[session_id]
        for shared in self._groups.values():
            shared.members.difference_update(members)
        for member in members:
            del self._held[member]

    def sessions(self) -> Counter[str]:
        """The number of remembered sessions per URL."""
        return Counter(home.member.url for home in self._homes.values())

    def _remember(self, session_id: str, member: Member, tokens: int, adapter: int | None) -> None:
        home = self._homes.get(session_id)
        if home is None:
            self._homes[session_id] = _Home(member, tokens, self._clock(), adapter)
            if len(self._homes) > self._remembered:
                self.release(next(iter(self._homes)))
        else:
            self._held[home.member] -= home.tokens
            home.member, home.tokens, home.at, home.adapter = member, tokens, self._clock(), adapter
            self._homes.move_to_end(session_id)
        self._held[member] += tokens

    def _share(self, group_id: str, member: Member, tokens: int) -> None:
        shared = self._groups.setdefault(group_id, _Shared(tokens, set(), 0.0))
        shared.tokens, shared.at = min(shared.tokens, tokens), self._clock()
        shared.members.add(member)
        self._groups.move_to_end(group_id)
        if len(self._groups) > self._remembered:
            self._groups.popitem(last=False)

    def _forget_unused(self) -> None:
        """Forget the sessions and groups that nobody has used for `_HELD_S`. The first ones were used least lately."""
        before = self._clock() - _HELD_S
        while self._homes and (oldest := next(iter(self._homes.items())))[1].at < before:
            self.release(oldest[0])
        while self._groups and (first := next(iter(self._groups.items())))[1].at < before:
            del self._groups[first[0]]
