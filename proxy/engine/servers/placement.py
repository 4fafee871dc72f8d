"""Sticky placement: a session's requests go to one server while it is alive, and new sessions to the least loaded one.

No request goes to a server that is ejected or leaving. A server with an open breaker gets requests only if no other
server takes them. A server that has lost or failed a request and has sampled no token since is the last choice.
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
"""A session leaves a server that runs over `_MORE` more requests, and over `_TIMES` as many, as another server."""


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool.

    `alive`: it answers and has the pool's state. `paused`, `released`: the pool paused it, or released these kinds of
    its memory, and has not undone that yet, even if the server was restarted. `leaving`: it takes no new requests and
    is removed after its last one. `doubtful`: it answers, but has lost or failed a request, or joined during a pause,
    and has sampled no token since. `served`: the number of requests so far. `failure`: the reason why it is not alive
    or is doubtful, else "".
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


def named_failure(url: str, why: str) -> str:
    """Return the failure `why`, prefixed with the server's URL unless it already contains the URL."""
    return why if url in why else f"{url}: {why}"


def _load(member: Member) -> tuple[bool, int, int]:
    """The sort key of preference, lowest first."""
    return member.doubtful, member.in_flight, member.served


class SessionPlacement:
    """Remembers the server of each session. `members`: the pool's own list, which changes at run time."""

    def __init__(self, members: Sequence[Member], remembered: int = _REMEMBERED_SESSIONS) -> None:
        self._members = members
        self._remembered = remembered
        self._of_session: OrderedDict[str, Member] = OrderedDict()

    def choose(self, session_id: str, failures: Sequence[Failure] = ()) -> Member:
        """Choose the server for a request; `session_id` may be "". Raises EngineUnavailable.

        `failures`: the earlier failures of this request. Their servers are chosen only if there is no other; servers
        that lost the request are then preferred to servers that failed it.
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
        """True if another server is so much less loaded that moving pays, despite its empty prefix cache.

        This happens after an outage, when all waiting requests went to the server that returned first.
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
        """Return the servers that take requests and are not named in `failures`.

        Servers with an open breaker are returned only if there are no others.
        """
        urls = {failure.url for failure in failures}
        untried = [member for member in self._members if member.takes and member.url not in urls]
        return [member for member in untried if member.sound] or untried

    def forget(self, member: Member) -> None:
        """Forget the sessions of a server, so that their next requests go to other servers."""
        for session_id in [name for name, other in self._of_session.items() if other is member]:
            del self._of_session[session_id]

    def sessions(self) -> Counter[str]:
        """The number of remembered sessions per URL."""
        return Counter(member.url for member in self._of_session.values())

    def _remember(self, session_id: str, member: Member) -> None:
        self._of_session[session_id] = member
        self._of_session.move_to_end(session_id)
        if len(self._of_session) > self._remembered:
            self._of_session.popitem(last=False)
