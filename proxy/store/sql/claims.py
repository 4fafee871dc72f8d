"""The queue of ended sessions for all trainers: a claim leases the oldest free ones, an acknowledgement removes them.

Delivery is at least once, in the order of ends. A lease expires by time alone: no code runs when it expires, and the
next claim finds its sessions free, in their old places (`_free`). A claim cannot acknowledge a session that another
claim holds by then. Claims of several replicas skip rows that others have locked (SKIP LOCKED), so no claim waits for
another and no session is leased twice; only claims of whole groups run one at a time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    and_,
    case,
    exists,
    func,
    literal,
    not_,
    null,
    or_,
    select,
    update,
)

from proxy.store.leases import Acknowledgement, AcknowledgeResult, Lease, LeaseRequest
from proxy.store.session_query import MAX_SESSION_IDS, SessionQuery
from proxy.store.sql.codec import decode_json
from proxy.store.sql.locks import pass_alone
from proxy.store.sql.reads import filtered
from proxy.store.sql.tables import WAITING, sessions
from tokengrove.errors import InvalidRequest, SessionNotFound, brief


def claim(connection: Connection, batch: Sequence[LeaseRequest]) -> Sequence[Lease]:
    """Lease sessions. A known claim id gets a new lease on the sessions that it still holds, and no others."""
    return [_claim(connection, each) for each in batch]


def acknowledge(connection: Connection, batch: Sequence[Acknowledgement]) -> Sequence[AcknowledgeResult]:
    """Acknowledge sessions. Raises SessionNotFound, and InvalidRequest for a session that has not ended."""
    return [_acknowledge(connection, each) for each in batch]


def is_waiting(connection: Connection, wanted: LeaseRequest) -> bool:
    """Return True if a claim would get a session."""
    return connection.execute(_free(connection, wanted, time.time()).limit(1)).first() is not None


def sessions_of(connection: Connection, claim_id: str) -> list[str]:
    """The sessions of a claim that no other claim has leased since, acknowledged or not, in order of their ends."""
    query = select(sessions.c.session_id).where(sessions.c.claimed_by == claim_id).order_by(sessions.c.ended_order)
    return list(connection.execute(query).scalars())


def _free(connection: Connection, wanted: LeaseRequest, now: float) -> Select[Any]:
    """Ended sessions that are neither leased nor acknowledged, in order of their ends; groups only if they are whole.

    `unit` is the group that a session is leased with, NULL if it is leased alone.
    """
    unheld = or_(sessions.c.claimed_until.is_(None), sessions.c.claimed_until <= now)
    size = sessions.c.group_size if wanted.group_size is None else literal(wanted.group_size)
    alone = size.is_(None) if wanted.group_size is None else and_(sessions.c.group_id.is_(None), size == 1)
    unit = case((alone, null()), else_=sessions.c.group_id).label("unit")
    query = filtered(select(sessions.c.session_id, sessions.c.ended_order, unit), wanted.wanted)
    whole = _is_whole(size, wanted.wanted.validation, now)
    query = query.where(WAITING, _queued(sessions), unheld, or_(alone, whole)).order_by(sessions.c.ended_order)
    if not wanted.wanted.reads_values:
        return query
    return query.where(sessions.c.session_id.in_(_fitting(connection, query, wanted.wanted)))


def _fitting(connection: Connection, query: Select[Any], wanted: SessionQuery) -> list[str]:
    """The first sessions of a query, at most MAX_SESSION_IDS, that meet the conditions on their values."""
    values = query.with_only_columns(sessions.c.session_id, sessions.c.metadata, sessions.c.metrics)
    fitting = (
        name
        for name, metadata, metrics in connection.execute(values)
        if wanted.fits(decode_json(metadata, {}), decode_json(metrics, {}))
    )
    return list(islice(fitting, MAX_SESSION_IDS))


def _queued(table: FromClause) -> ColumnElement[bool]:
    """Whether the queue delivers a session: no runner delivers it, and it is not withdrawn."""
    return and_(table.c.delivery.is_(None), table.c.withdrawn_at.is_(None))


def _is_whole(size: ColumnElement[Any], validation: bool | None, now: float) -> ColumnElement[bool]:
    """Whether a session's group has at least `size` members, all have ended, and no claim holds one of them.

    Only sessions that the queue delivers are members. `validation`: only validation sessions are members, or none of
    them is, as the claim requests; None: all are.
    """
    other = sessions.alias()
    same = and_(other.c.group_id == sessions.c.group_id, _queued(other))
    if validation is not None:
        same = and_(same, other.c.validation.is_(validation))
    held = and_(other.c.claimed_until > now, other.c.acknowledged_at.is_(None))
    busy = select(other.c.number).where(same, or_(other.c.ended_order.is_(None), held))
    count = select(func.count()).select_from(other).where(same).scalar_subquery()
    return and_(count >= size, not_(exists(busy)))


def _claim(connection: Connection, wanted: LeaseRequest) -> Lease:
    # Otherwise two equal requests at once, on two replicas, would lease twice as many sessions, and no trainer would
    # get half of them.
    pass_alone(connection, f"claim {wanted.claim_id}")
    now = time.time()
    until = now + wanted.lease_s
    known = sessions_of(connection, wanted.claim_id)
    if known:
        query = _held(wanted.claim_id).order_by(sessions.c.session_id).with_for_update()
        held = set(connection.execute(query).scalars())
        names = [name for name in known if name in held]
    else:
        names = _take(connection, wanted, now)
    ended_by = _ended_by(connection, wanted.claim_id)
    if names:
        leased = update(sessions).where(sessions.c.session_id.in_(names))
        values = {"claimed_by": wanted.claim_id, "claimed_until": until, "claimed_order": ended_by}
        connection.execute(leased.values(values))
    return Lease(wanted.claim_id, tuple(names), until, ended_by, again=bool(known))


def _ended_by(connection: Connection, claim_id: str) -> int:
    """The last `ended_order` at the first request of a claim; the current one for a new claim; 0 if none has ended."""
    noted = select(func.max(sessions.c.claimed_order)).where(sessions.c.claimed_by == claim_id)
    newest = select(func.max(sessions.c.ended_order))
    found = connection.execute(noted).scalar()
    return found if found is not None else connection.execute(newest).scalar() or 0


def _take(connection: Connection, wanted: LeaseRequest, now: float) -> list[str]:
    """Lock sessions to lease, whole groups together, in order of their ends."""
    query = _free(connection, wanted, now)
    found = connection.execute(query.limit(wanted.limit).with_for_update(skip_locked=True, of=sessions)).all()
    groups = {row.unit for row in found if row.unit is not None}
    members = _take_groups(connection, query.where(sessions.c.group_id.in_(groups))) if groups else {}
    taken: dict[str, int] = {}
    for row in found:
        unit = {row.session_id: row.ended_order} if row.unit is None else members.pop(row.unit, {})
        if taken and len(taken | unit) > wanted.limit:
            break
        taken |= unit
    return sorted(taken, key=taken.__getitem__)


def _take_groups(connection: Connection, query: Select[Any]) -> dict[str, dict[str, int]]:
    """Lock the free sessions of groups. Return by group the `ended_order` of its sessions, by id.

    If another transaction has locked a session of a group, the group is left to it or to the next claim.
    """
    pass_alone(connection, "claims of groups")  # two claims could otherwise lock a part of one group each
    wanted = connection.execute(query).all()
    locked = set(connection.execute(query.with_for_update(skip_locked=True, of=sessions)).scalars())
    left = {row.unit for row in wanted if row.session_id not in locked}
    groups: dict[str, dict[str, int]] = defaultdict(dict)
    for row in wanted:
        if row.unit is not None and row.unit not in left:
            groups[row.unit][row.session_id] = row.ended_order
    return groups


def _held(claim_id: str) -> Select[Any]:
    mine = and_(sessions.c.claimed_by == claim_id, sessions.c.acknowledged_at.is_(None))
    return select(sessions.c.session_id).where(mine)


def _acknowledge(connection: Connection, done: Acknowledgement) -> AcknowledgeResult:
    now = time.time()
    rows = _lock(connection, done.session_ids)
    lost: dict[str, str | None] = dict.fromkeys(_deleted(done, rows))
    lost |= {name: row.claimed_by for name, row in rows.items() if not _may_acknowledge(row, done.claim_id, now)}
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
    for name, row in rows.items():
        if row.ended_order is None:
            raise InvalidRequest(
                f"session {brief(name)} has not ended; only ended ones are claimed", param="session_ids"
            )
    return rows


def _deleted(done: Acknowledgement, rows: Mapping[str, Row[Any]]) -> list[str]:
    """The sessions of a claim that no longer exist. Without a claim id, raises SessionNotFound for them."""
    gone = [name for name in done.session_ids if name not in rows]
    if gone and done.claim_id is None:
        raise SessionNotFound(f"there is no session {brief(gone[0])}", param="session_ids")
    return gone


def _may_acknowledge(row: Row[Any], claim_id: str | None, now: float) -> bool:
    """Return True if the claim still holds the session; without a claim id, if no lease runs or it is acknowledged."""
    if claim_id is not None:
        return bool(row.claimed_by == claim_id)
    held = row.claimed_until is not None and row.claimed_until > now
    return row.acknowledged_at is not None or not held
