"""One queue of ended sessions for all trainers: a claim leases the first that nobody holds, an acknowledgement ends it.

Sessions are given in the order in which they ended, at least once: a lease that runs out puts its sessions back in
their old places, and nobody can acknowledge what another claim holds by then. Claims on several servers pass over the
rows that each other is taking (SKIP LOCKED), so none waits for another and no session is given twice.
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
    """A claim whose name is known is given what it holds, leased anew, and nothing else."""
    return [_claim(connection, each) for each in batch]


def acknowledge(connection: Connection, batch: Sequence[Acknowledgement]) -> Sequence[AcknowledgeResult]:
    """Raises SessionNotFound, and InvalidRequest for a session that has not ended."""
    return [_acknowledge(connection, each) for each in batch]


def is_waiting(connection: Connection, wanted: SessionQuery) -> bool:
    """Whether a claim would be given anything."""
    return connection.execute(_free(wanted, time.time()).limit(1)).first() is not None


def sessions_of(connection: Connection, claim_id: str) -> list[str]:
    """All sessions that a claim has leased and nobody took over, acknowledged ones too, in order of their ends."""
    query = select(sessions.c.session_id).where(sessions.c.claimed_by == claim_id).order_by(sessions.c.ended_order)
    return list(connection.execute(query).scalars())


def _free(wanted: SessionQuery, now: float) -> Select[Any]:
    """Ended sessions that nobody holds or has acknowledged, in order of their ends."""
    unheld = or_(sessions.c.claimed_until.is_(None), sessions.c.claimed_until <= now)
    return filtered(select(sessions.c.session_id), wanted).where(WAITING, unheld).order_by(sessions.c.ended_order)


def _claim(connection: Connection, wanted: LeaseRequest) -> Lease:
    # Asked for twice at once, on two servers, it would else be given twice as much, and nobody hears of one half.
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
    """A claim may where nobody took over; without one, where nobody's lease runs or all is done already."""
    if claim_id is not None:
        return bool(row.claimed_by == claim_id)
    held = row.claimed_until is not None and row.claimed_until > now
    return row.acknowledged_at is not None or not held
