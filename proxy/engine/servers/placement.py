"""Sticky placement: a session's requests go to one server while it lives, new sessions to the least loaded one.

No request goes to a server that is ejected or leaving, and none to one whose breaker is open while another server takes
requests. A server that has lost or failed a request and has sampled no token since is the last choice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from proxy.engine.requests import Failure
from proxy.engine.servers.breaker import Breaker
from proxy.engine.servers.remote import RemoteEngine
from tokengrove.errors import EngineUnavailable

RETRY_AFTER_S = 5.0
_REMEMBERED_SESSIONS = 65_536

_MORE, _TIMES = 32, 1.5
"""A session leaves its server if that one runs this many requests more, and as many times as many, as another one."""


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool.

    `alive`: it answers and is in the pool's state. `paused`, `released`: it was told to pause, or to release these
    kinds of memory, and not yet told to end that, even if it was restarted meanwhile. `leaving`: it takes no new
    requests and is dropped after its last one. `doubtful`: it answers, but has lost or failed a request, or joined
    during a pause, and has sampled no token since. `served`: requests so far. `failure`: why it is not alive or
    doubtful, "" if it is fine.
    """

    engine: RemoteEngine
    alive: bool = False
    paused: bool = False
    released: frozenset[str] = frozenset()
    leaving: bool = False
    doubtful: bool = False
    in_flight: int = 0
    served: int = 0
    failure: str = ""
    breaker: Breaker = field(default_factory=Breaker)

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def takes(self) -> bool:
        """True if the server takes new requests, if only because no other one does."""
        return self.alive and not self.leaving

    @property
    def sound(self) -> bool:
        """True if the server takes new requests while others do, too."""
        return self.alive and not self.leaving and not self.breaker.open

    @property
    def state(self) -> str:
        """The state in one word, as `GET /engine/servers` shows it."""
        if self.leaving:
            return "leaving"
        if not self.alive:
            return "ejected"
        return "failing" if self.breaker.open else "alive"


def named_failure(url: str, why: str) -> str:
    """Return the failure `why` with the server's URL in front, unless it names the URL already."""
    return why if url in why else f"{url}: {why}"


def _load(member: Member) -> tuple[bool, int, int]:
    """The order of preference, the lowest first."""
    return member.doubtful, member.in_flight, member.served


class SessionPlacement:
    """Remembers the server of each session. `members` is the pool's own list, which changes at run time."""

    def __init__(self, members: Sequence[Member], remembered: int = _REMEMBERED_SESSIONS) -> None:
        self._members = members
        self._remembered = remembered
        self._of_session: OrderedDict[str, Member] = OrderedDict()

    def choose(self, session_id: str, failures: Sequence[Failure] = ()) -> Member:
        """Choose the server for a request; `session_id` may be "". Raises EngineUnavailable.

        `failures`: of servers at this request, which are asked only if there is no other; those that lost it first.
        """
        member = self._of_session.get(session_id) if session_id else None
        if failures:
            failed = {failure.url for failure in failures if not failure.lost}
            servers = self.untried(failures) or self.candidates()
            member = min(servers, key=lambda server: (server.url in failed, *_load(server)))
        elif member is None or not member.sound or member.doubtful or self._crowded(member):
            member = min(self.candidates(), key=_load)
        if session_id:
            self._remember(session_id, member)
        return member

    def _crowded(self, member: Member) -> bool:
        """True if a server runs far more than another one, which is idle enough to make up for its empty prefix cache.

        So it is after an outage: everybody who waited went to the server that returned first.
        """
        if member.in_flight <= _MORE:
            return False
        least = min(other.in_flight for other in self.candidates() if not other.doubtful or other is member)
        return member.in_flight > max(least + _MORE, least * _TIMES)

    @property
    def open(self) -> bool:
        """True if a server takes requests."""
        return any(member.takes for member in self._members)

    def candidates(self) -> list[Member]:
        """Return the servers that take requests, at least one. Raises EngineUnavailable if there is none."""
        candidates = [member for member in self._members if member.sound] or [m for m in self._members if m.takes]
        if not candidates:
            why = "; ".join(named_failure(m.url, m.failure) for m in self._members if m.failure) or "the pool is empty"
            raise EngineUnavailable(f"no engine server is available ({why})", retry_after_s=RETRY_AFTER_S)
        return candidates

    def untried(self, failures: Sequence[Failure]) -> list[Member]:
        """Return the servers that take requests and have no part in `failures`; those with an open breaker last."""
        urls = {failure.url for failure in failures}
        untried = [member for member in self._members if member.takes and member.url not in urls]
        return [member for member in untried if member.sound] or untried

    def forget(self, member: Member) -> None:
        """Forget the sessions of a server; their next requests go to others."""
        for session_id in [name for name, other in self._of_session.items() if other is member]:
            del self._of_session[session_id]

    def sessions(self) -> Counter[str]:
        """Count the remembered sessions per URL."""
        return Counter(member.url for member in self._of_session.values())

    def _remember(self, session_id: str, member: Member) -> None:
        self._of_session[session_id] = member
        self._of_session.move_to_end(session_id)
        if len(self._of_session) > self._remembered:
            self._of_session.popitem(last=False)
