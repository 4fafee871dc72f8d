"""Which server a session's next request goes to: its own while that lives, else the one with the fewest in flight.

Nothing goes to a server that is out or leaving; one that just lost a request gets others only where there is no choice.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.engine.servers.remote import RemoteEngine
from proxy.errors import EngineUnavailable

RETRY_AFTER_S = 5.0
_REMEMBERED_SESSIONS = 65_536


@dataclass(slots=True, eq=False)
class Member:
    """A server of the pool. `leaving`: it takes no more requests and goes when the last one has ended.

    `paused`, `released`: what it was told and not yet told to end, whatever became of it meanwhile. `doubtful`: it
    answers, but lost the last request that it had.
    """

    engine: RemoteEngine
    alive: bool = False
    paused: bool = False
    released: bool = False
    leaving: bool = False
    doubtful: bool = False
    in_flight: int = 0
    served: int = 0
    failure: str = ""

    @property
    def url(self) -> str:
        return self.engine.url

    @property
    def open(self) -> bool:
        """Whether it takes requests."""
        return self.alive and not self.leaving


class SessionPlacement:
    """The sessions of the servers in `members`, a list that grows and shrinks."""

    def __init__(self, members: Sequence[Member], remembered: int = _REMEMBERED_SESSIONS) -> None:
        self._members = members
        self._remembered = remembered
        self._of_session: OrderedDict[str, Member] = OrderedDict()

    def choose(self, session_id: str) -> Member:
        """The server for a request; without a session there is nothing to stay with. Raises EngineUnavailable."""
        candidates = self.candidates()
        member = self._of_session.get(session_id) if session_id else None
        if member is None or not member.open or member.doubtful:
            member = min(candidates, key=lambda m: (m.doubtful, m.in_flight, m.served))
        if session_id:
            self._remember(session_id, member)
        return member

    def candidates(self) -> list[Member]:
        """The servers that take requests, at least one. Raises EngineUnavailable."""
        candidates = [member for member in self._members if member.open]
        if not candidates:
            why = "; ".join(f"{m.url}: {m.failure}" for m in self._members if m.failure) or "the pool is empty"
            raise EngineUnavailable(f"no engine server is alive ({why})", retry_after_s=RETRY_AFTER_S)
        return candidates

    def forget(self, member: Member) -> None:
        """Its sessions go elsewhere."""
        for session_id in [name for name, other in self._of_session.items() if other is member]:
            del self._of_session[session_id]

    def sessions(self) -> Counter[str]:
        """How many sessions each URL has."""
        return Counter(member.url for member in self._of_session.values())

    def _remember(self, session_id: str, member: Member) -> None:
        self._of_session[session_id] = member
        self._of_session.move_to_end(session_id)
        if len(self._of_session) > self._remembered:
            self._of_session.popitem(last=False)
