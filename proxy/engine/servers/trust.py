"""The trust in the servers of a pool: failures, breakers, and the proofs that restore trust.

A server that loses or fails a request is doubtful until it samples a token, and is the last choice of placement. Its
breaker counts only failures of requests that another server answered, and a proof closes the breaker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from proxy.engine.requests import Failure
from proxy.engine.servers.events import ServerEvents
from proxy.engine.servers.placement import Member
from proxy.engine.servers.proof import Proofs
from proxy.engine.servers.remote import AdapterLost, RemoteEngine
from tokengrove.errors import EngineBusy, EngineLost, ProxyError


def failure_of(member: Member, error: ProxyError) -> Failure:
    """Return the failure of a request on a server, at the current time."""
    return Failure(
        member.url,
        error.message,
        time.monotonic(),
        lost=isinstance(error, EngineLost),
        counts=not isinstance(error, EngineBusy | AdapterLost),
    )


class Trust:
    """Judges `members`, the pool's own list. `resting` returns True while servers must not sample."""

    def __init__(self, members: Sequence[Member], resting: Callable[[], bool], events: ServerEvents) -> None:
        self._members, self._resting, self.events = members, resting, events
        self._proofs = Proofs()

    def doubt(self, member: Member, error: ProxyError) -> None:
        """Make a server doubtful, the last choice until it samples a token."""
        member.doubtful = True
        if member.alive:
            member.failure = error.message

    def clear(self, member: Member) -> None:
        """End the doubt, since the server has sampled a token. Its breaker waits for a complete answer or a proof."""
        member.doubtful = False
        if member.alive and not member.breaker.open:
            member.failure = ""

    def credit(self, member: Member, failures: Sequence[Failure]) -> None:
        """Note that a server has answered a request, so that the `failures` of other servers at this request count."""
        if member.breaker.open:
            self.readmit(member)
        member.breaker.credit()
        for failure in failures:
            for other in self._members:
                if other.url == failure.url and other is not member and failure.counts:
                    self._blame(other, failure)

    def readmit(self, member: Member) -> None:
        """Close the breaker of a server that has sampled a token, and end the doubt."""
        if member.breaker.open:
            self.events.info("engine server gets requests again", member.url)
        member.breaker.close()
        self.clear(member)

    async def prove(self, engine: RemoteEngine, *, follows: bool = False) -> bool:
        """Make a server sample a token; return False if this must wait. Raises the error of a server that fails.

        `follows`: another process has admitted the server.
        """
        return not self._resting() and await self._proofs.prove(engine, follows=follows)

    async def review(self, member: Member) -> None:
        """Make a server sample a token if it is doubtful or its breaker is open.

        This is skipped if the next probe is not due yet, or if the server was ejected, since it may still be paused. If
        the server fails, another server gets the same request. The failure counts only if the other server succeeds.
        """
        if not member.takes or not (member.doubtful or member.breaker.open) or not member.breaker.due:
            return
        try:
            if await self.prove(member.engine):
                self.readmit(member)
        except ProxyError as error:
            failure = failure_of(member, error)
            self.doubt(member, error)
            member.breaker.postpone()
            others = [other for other in self._others(member) if not other.doubtful]
            if others and failure.counts:
                with suppress(ProxyError):
                    if await self.prove(min(others, key=lambda other: other.in_flight).engine):
                        self._blame(member, failure)

    async def rest(self) -> None:
        """Wait until no proof is in progress. None begins while `resting` is true."""
        await self._proofs.end()

    def _blame(self, member: Member, failure: Failure) -> None:
        """Count a failure against a server, since another server has answered the request."""
        if member.alive and member.breaker.blame(failure.at, alone=not self._others(member)):
            member.failure = failure.why
            self.events.warning(
                "engine server is shut out: others answer what it fails", member.url, reason=failure.why
            )

    def _others(self, member: Member) -> list[Member]:
        """The servers that take requests instead of this one."""
        return [other for other in self._members if other.sound and other is not member]
