"""Values of the claim queue: a trainer's request, its lease, and its acknowledgement.

`sql.claims` compares `lease_until` with the clock at the next claim; nothing else expires a lease.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proxy.store.session_query import SessionQuery


@dataclass(frozen=True, slots=True)
class Queue:
    """The queue of a trained route: a session is in the queue of each that it has turns of.

    `route`: None: the server's own, which also has the sessions without turns, but none that only has turns of
    `others`, the trained routes besides the server's own.
    """

    route: str | None = None
    others: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseRequest:
    """Lease at most `limit` of the `wanted` ended sessions for `lease_s` seconds under the name `claim_id`.

    `group_size`: lease only whole groups of this many sessions; None: the size that each session was started with. A
    group that is larger than `limit` is leased alone. `queue`: whose sessions.
    """

    claim_id: str
    wanted: SessionQuery
    limit: int
    lease_s: float
    group_size: int | None = None
    queue: Queue = Queue()


@dataclass(frozen=True, slots=True)
class Lease:
    """The sessions that a claim holds, in the order in which they ended. `lease_until`: Unix seconds.

    `ended_by`: the last `ended_order` when they were leased; repetitions of the claim return the same value.
    `again`: True if the claim id was known; then the sessions are the ones that it still holds, and no new ones.
    """

    claim_id: str
    sessions: tuple[str, ...]
    lease_until: float
    ended_by: int
    again: bool


@dataclass(frozen=True, slots=True)
class Acknowledgement:
    """The sessions are trained. `claim_id`: the claim that must hold them; None: no running lease may hold them.

    `queue`: whose sessions.
    """

    claim_id: str | None
    session_ids: tuple[str, ...]
    queue: Queue = Queue()


@dataclass(frozen=True, slots=True)
class AcknowledgeResult:
    """The acknowledged `sessions`, and the other sessions by id (`lost`), each with the claim that holds it now.

    None: no claim holds it, or it was deleted or withdrawn.
    """

    sessions: tuple[str, ...]
    lost: Mapping[str, str | None]
