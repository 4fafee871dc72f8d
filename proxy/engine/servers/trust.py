"""Which servers of a pool can be trusted with requests: failures, breakers, and the proofs that mend them.

A server that loses or fails a request is doubted until it samples a token: it is the last choice of placement. Its
breaker counts the failures that another server has shown to be its own, and a proof closes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from proxy.engine.requests import Failure
from proxy.engine.servers.events import ServerEvents
from proxy.engine.servers.placement import Member
from proxy.engine.servers.proof import Proofs
from proxy.engine.servers.remote import RemoteEngine
from tokengrove.errors import EngineBusy, EngineLost, ProxyError


def failure_of(member: Member, error: ProxyError) -> Failure:
    """Note that a server failed a request just now."""
    return Failure(
        member.url,
        error.message,
        time.monotonic(),
        lost=isinstance(error, EngineLost),
        counts=not isinstance(error, EngineBusy),
    )


class Trust:
    """Judges `members`, the pool's own list. `resting` is true while no server may be asked for a token."""

    def __init__(self, members: Sequence[Member], resting: Callable[[], bool], events: ServerEvents) -> None:
        self._members, self._resting, self.events = members, resting, events
        self._proofs = Proofs()

    def doubt(self, member: Member, error: ProxyError) -> None:
        """Make a server the last choice until it samples a token."""
        member.doubtful = True
        if member.alive:
            member.failure = error.message

    def clear(self, member: Member) -> None:
        """End the doubt: the server has sampled a token. Its breaker waits for a whole answer, or a proof."""
        member.doubtful = False
        if member.alive and not member.breaker.open:
            member.failure = ""

    def credit(self, member: Member, failures: Sequence[Failure]) -> None:
        """Note that a server has answered a request, at which others had the `failures`: these count now."""
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
        """Have a server sample a token; False if that has to wait. Raises the error of a server that fails.

        `follows`: another process has let the server in.
        """
        return not self._resting() and await self._proofs.prove(engine, follows=follows)

    async def review(self, member: Member) -> None:
        """Have a server sample a token if it is doubted or its breaker is open, unless it had to just before, or was
        ejected meanwhile, as it may still be paused.

        If it fails, another server is asked for the same: the failure counts only if that one succeeds.
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
        """Wait until no proof is in progress. From now on none begins while the pool rests."""
        await self._proofs.end()

    def _blame(self, member: Member, failure: Failure) -> None:
        """Count a failure against a server: another one has answered the request."""
        if member.alive and member.breaker.blame(failure.at, alone=not self._others(member)):
            member.failure = failure.why
            self.events.warning(
                "engine server is shut out: others answer what it fails", member.url, reason=failure.why
            )

    def _others(self, member: Member) -> list[Member]:
        """The servers that take requests instead of this one."""
        return [other for other in self._members if other.sound and other is not member]
