"""The queue of ended sessions for all trainers: a claim leases the oldest free ones, an acknowledgement removes them.

Delivery is at least once, in the order of ends. A lease expires by time alone: nothing runs at its end, and the next
claim finds its sessions free, in their old places (`_free`). A claim cannot acknowledge a session that another claim
holds by then. Claims of several replicas skip the rows that others are taking (SKIP LOCKED), so none waits for another
and no session is leased twice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row, Select, and_, or_, select, update

from proxy.errors import InvalidRequest, SessionNotFound
from proxy.store.leases import Acknowledgement, AcknowledgeResult, Lease, LeaseRequest
from proxy.store.session_query import SessionQuery
from proxy.store.sql.locks import pass_alone
from proxy.store.sql.reads import filtered
from proxy.store.sql.tables import WAITING, sessions


def claim(connection: Connection, batch: Sequence[LeaseRequest]) -> Sequence[Lease]:
    """Lease sessions. A known claim id gets a new lease on the sessions that it still holds, and no others."""
    return [_claim(connection, each) for each in batch]


def acknowledge(connection: Connection, batch: Sequence[Acknowledgement]) -> Sequence[AcknowledgeResult]:
    """Acknowledge sessions. Raises SessionNotFound, and InvalidRequest for a session that has not ended."""
    return [_acknowledge(connection, each) for each in batch]


def is_waiting(connection: Connection, wanted: SessionQuery) -> bool:
    """Return True if a claim would get a session."""
    return connection.execute(_free(wanted, time.time()).limit(1)).first() is not None


def sessions_of(connection: Connection, claim_id: str) -> list[str]:
    """The sessions leased to a claim that no other claim took over, acknowledged or not, in order of their ends."""
    query = select(sessions.c.session_id).where(sessions.c.claimed_by == claim_id).order_by(sessions.c.ended_order)
    return list(connection.execute(query).scalars())


def _free(wanted: SessionQuery, now: float) -> Select[Any]:
    """Ended sessions that are neither leased nor acknowledged, in order of their ends."""
    unheld = or_(sessions.c.claimed_until.is_(None), sessions.c.claimed_until <= now)
    return filtered(select(sessions.c.session_id), wanted).where(WAITING, unheld).order_by(sessions.c.ended_order)


def _claim(connection: Connection, wanted: LeaseRequest) -> Lease:
    # Two equal requests at once, on two replicas, would otherwise lease twice as many, half of them to nobody.
    pass_alone(connection, f"claim {wanted.claim_id}")
    now = time.time()
    known = sessions_of(connection, wanted.claim_id)
    if known:
        query = _held(wanted.claim_id).order_by(sessions.c.session_id).with_for_update()
        held = set(connection.execute(query).scalars())
        names = [name for name in known if name in held]
    else:
        query = _free(wanted.wanted, now).limit(wanted.limit).with_for_update(skip_locked=True)
        names = list(connection.execute(query).scalars())
    until = now + wanted.lease_s
    if names:
        leased = update(sessions).where(sessions.c.session_id.in_(names))
        connection.execute(leased.values(claimed_by=wanted.claim_id, claimed_until=until))
    return Lease(wanted.claim_id, tuple(names), until, again=bool(known))


def _held(claim_id: str) -> Select[Any]:
    mine = and_(sessions.c.claimed_by == claim_id, sessions.c.acknowledged_at.is_(None))
    return select(sessions.c.session_id).where(mine)


def _acknowledge(connection: Connection, done: Acknowledgement) -> AcknowledgeResult:
    now = time.time()
    rows = _lock(connection, done.session_ids)
    lost = {name: row.claimed_by for name, row in rows.items() if not _may_acknowledge(row, done.claim_id, now)}
    names = tuple(name for name in done.session_ids if name not in lost)
    new = and_(sessions.c.session_id.in_(names), sessions.c.acknowledged_at.is_(None))
    connection.execute(update(sessions).where(new).values(acknowledged_at=now))
    return AcknowledgeResult(names, lost)


def _lock(connection: Connection, names: Collection[str]) -> dict[str, Row[Any]]:
    columns = sessions.c
    query = (
        select(*(columns.session_id, columns.ended_order, columns.claimed_by, columns.claimed_until))
        .add_columns(columns.acknowledged_at)
        .where(columns.session_id.in_(names))
        .order_by(columns.session_id)
        .with_for_update()
    )
    rows = {row.session_id: row for row in connection.execute(query)}
    for name in names:
        if name not in rows:
            raise SessionNotFound(f"there is no session {name!r}", param="session_ids")
        if rows[name].ended_order is None:
            raise InvalidRequest(f"session {name!r} has not ended; only ended ones are claimed", param="session_ids")
    return rows


def _may_acknowledge(row: Row[Any], claim_id: str | None, now: float) -> bool:
    """Return True if the claim still holds the session; without a claim, if no lease runs or it is acknowledged."""
    if claim_id is not None:
        return bool(row.claimed_by == claim_id)
    held = row.claimed_until is not None and row.claimed_until > now
    return row.acknowledged_at is not None or not held
