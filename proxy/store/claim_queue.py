"""The trainers' queue of ended sessions: claim, train, acknowledge."""

from __future__ import annotations

from proxy.store.bell import Bell
from proxy.store.leases import Acknowledgement, AcknowledgeResult, Lease, LeaseRequest, Queue
from proxy.store.open_database import OpenDatabase
from proxy.store.sql import claims


class ClaimQueue:
    """Leases ended sessions to trainers. `ends` rings when a session ends on this replica."""

    def __init__(self, database: OpenDatabase, ends: Bell) -> None:
        self._database = database
        self.ends = ends

    async def claim(self, wanted: LeaseRequest) -> Lease:
        """Lease ended sessions; a known claim id gets a new lease on the sessions that it still holds."""
        lease: Lease = await self._database.write.submit(claims.claim, wanted)
        return lease

    async def acknowledge(self, done: Acknowledgement) -> AcknowledgeResult:
        """Permanently remove sessions from the queue. Raises SessionNotFound, and InvalidRequest for a live session."""
        result: AcknowledgeResult = await self._database.write.submit(claims.acknowledge, done)
        return result

    async def is_waiting(self, wanted: LeaseRequest) -> bool:
        """Return True if a claim would get a session."""
        return await self._database.read(claims.is_waiting, wanted)

    async def sessions_of_claim(self, claim_id: str, queue: Queue) -> list[str]:
        """The sessions of a claim that no other claim has leased since, acknowledged or not, in order of their ends."""
        return await self._database.read(claims.sessions_of, claim_id, queue)

    async def queues_of_claim(self, claim_id: str) -> list[str | None]:
        """The routes in whose queues a claim holds sessions; None: the server's own."""
        return await self._database.read(claims.queues_of, claim_id)
