"""The queue of ended sessions for all trainers: a claim leases the oldest free ones, an acknowledgement removes them.

Delivery is at least once, in the order of ends. A lease expires by time alone: no code runs when it expires, and the
next claim finds its sessions free, in their old places (`_free`). A claim cannot acknowledge a session that another
claim holds by then. Claims of several replicas skip rows that others have locked (SKIP LOCKED), so no claim waits for
another and no session is leased twice; only claims of whole groups run one at a time.

Each trained route has a queue of its own. The state of the server's own route is in `sessions`, that of the others in
`session_routes`.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import (
    ColumnElement,
    Connection,
    FromClause,
    Row,
    Select,
    Table,
    TextClause,
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

from proxy.store.leases import Acknowledgement, AcknowledgeResult, Lease, LeaseRequest, Queue
from proxy.store.session_query import MAX_SESSION_IDS, SessionQuery
from proxy.store.sql.codec import decode_json
from proxy.store.sql.locks import pass_alone
from proxy.store.sql.reads import filtered
from proxy.store.sql.tables import QUEUED_ROUTES, WAITING, session_routes, sessions
from tokengrove.errors import InvalidRequest, SessionNotFound, brief
from tokengrove.options.model import RouteKind

_POLICY = RouteKind.POLICY.value


def claim(connection: Connection, batch: Sequence[LeaseRequest]) -> Sequence[Lease]:
    """Lease sessions. A known claim id gets a new lease on the sessions that it still holds, and no others."""
    return [_claim(connection, each) for each in batch]


def acknowledge(connection: Connection, batch: Sequence[Acknowledgement]) -> Sequence[AcknowledgeResult]:
    """Acknowledge sessions. Raises SessionNotFound, and InvalidRequest for a session that has not ended."""
    return [_acknowledge(connection, each) for each in batch]


def is_waiting(connection: Connection, wanted: LeaseRequest) -> bool:
    """Return True if a claim would get a session."""
    return connection.execute(_free(connection, wanted, time.time()).limit(1)).first() is not None


def sessions_of(connection: Connection, claim_id: str, queue: Queue) -> list[str]:
    """The sessions of a claim that no other claim has leased since, acknowledged or not, in order of their ends."""
    state = _state(queue)
    query = state.joined(select(sessions.c.session_id)).where(state.rows.c.claimed_by == claim_id)
    return list(connection.execute(query.order_by(sessions.c.ended_order)).scalars())


def queues_of(connection: Connection, claim_id: str) -> list[str | None]:
    """The routes in whose queues a claim holds sessions, acknowledged or not; None: the server's own."""
    own = select(sessions.c.number).where(sessions.c.claimed_by == claim_id).limit(1)
    others = select(session_routes.c.route).where(session_routes.c.claimed_by == claim_id).distinct()
    found: list[str | None] = [] if connection.execute(own).first() is None else [None]
    return [*found, *connection.execute(others.order_by(session_routes.c.route)).scalars()]


class _State(NamedTuple):
    """The `rows` with the state of a queue. `mine`: those of its route."""

    rows: Table
    mine: ColumnElement[bool]

    def joined(self, query: Select[Any]) -> Select[Any]:
        """A query of `sessions`, restricted to those in the queue."""
        if self.rows is sessions:
            return query.where(self.mine)
        return query.join(self.rows, self.rows.c.session_id == sessions.c.session_id).where(self.mine)


def _state(queue: Queue) -> _State:
    if queue.route is not None:
        return _State(session_routes, _is_trained_by(session_routes, queue.route))
    if not queue.others:
        return _State(sessions, literal(True))
    rows = session_routes.alias()
    of_session = select(rows.c.route).where(rows.c.session_id == sessions.c.session_id, rows.c.kind == _POLICY)
    elsewhere = exists(of_session.where(rows.c.route.in_(queue.others)))
    here = exists(of_session.where(rows.c.route.not_in(queue.others)))
    return _State(sessions, or_(not_(elsewhere), here))


def _is_trained_by(rows: FromClause, route: str) -> ColumnElement[bool]:
    return and_(rows.c.route == route, rows.c.kind == _POLICY)


def _free(connection: Connection, wanted: LeaseRequest, now: float) -> Select[Any]:
    """Ended sessions that are neither leased nor acknowledged, in order of their ends; groups only if they are whole.

    `unit` is the group that a session is leased with, NULL if it is leased alone.
    """
    state = _state(wanted.queue)
    columns = state.rows.c
    unheld = or_(columns.claimed_until.is_(None), columns.claimed_until <= now)
    waiting: ColumnElement[bool] | TextClause = WAITING
    if state.rows is not sessions:
        waiting = and_(columns.acknowledged_at.is_(None), sessions.c.ended_order.is_not(None))
    size = sessions.c.group_size if wanted.group_size is None else literal(wanted.group_size)
    alone = size.is_(None) if wanted.group_size is None else and_(sessions.c.group_id.is_(None), size == 1)
    unit = case((alone, null()), else_=sessions.c.group_id).label("unit")
    query = filtered(state.joined(select(sessions.c.session_id, sessions.c.ended_order, unit)), wanted.wanted)
    whole = _is_whole(size, wanted, now)
    query = query.where(waiting, _queued(sessions), unheld, or_(alone, whole)).order_by(sessions.c.ended_order)
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


def _is_whole(size: ColumnElement[Any], wanted: LeaseRequest, now: float) -> ColumnElement[bool]:
    """Whether a session's group has at least `size` members, all have ended, and no claim holds one of them.

    Only sessions that claims deliver are members, whatever routes they have. Only validation sessions are members, or
    none of them is, if the claim requests it.
    """
    other, validation = sessions.alias(), wanted.wanted.validation
    same = and_(other.c.group_id == sessions.c.group_id, _queued(other))
    if validation is not None:
        same = and_(same, other.c.validation.is_(validation))
    held = and_(other.c.claimed_until > now, other.c.acknowledged_at.is_(None))
    if wanted.queue.route is not None:
        rows = session_routes.alias()
        held = exists(select(rows.c.route)).where(
            rows.c.session_id == other.c.session_id,
            _is_trained_by(rows, wanted.queue.route),
            *(rows.c.claimed_until > now, rows.c.acknowledged_at.is_(None)),
        )
    # Both are counts: for `NOT EXISTS`, PostgreSQL may first read the busy sessions of all groups, the whole table.
    members = select(func.count()).select_from(other).where(same)
    busy = members.where(or_(other.c.ended_order.is_(None), held))
    return and_(members.scalar_subquery() >= size, busy.scalar_subquery() == 0)


def _claim(connection: Connection, wanted: LeaseRequest) -> Lease:
    # Otherwise two equal requests at once, on two replicas, would lease twice as many sessions, and no trainer would
    # get half of them.
    pass_alone(connection, f"claim {wanted.claim_id}")
    now, state = time.time(), _state(wanted.queue)
    until = now + wanted.lease_s
    known = sessions_of(connection, wanted.claim_id, wanted.queue)
    if known:
        query = _held(state, wanted.claim_id).order_by(state.rows.c.session_id).with_for_update()
        held = set(connection.execute(query).scalars())
        names = [name for name in known if name in held]
    else:
        names = _take(connection, wanted, now)
    ended_by = _ended_by(connection, state, wanted.claim_id)
    if names:
        leased = update(state.rows).where(state.rows.c.session_id.in_(names), state.mine)
        values = {"claimed_by": wanted.claim_id, "claimed_until": until, "claimed_order": ended_by}
        connection.execute(leased.values(values))
    return Lease(wanted.claim_id, tuple(names), until, ended_by, again=bool(known))


def _ended_by(connection: Connection, state: _State, claim_id: str) -> int:
    """The last `ended_order` at the first request of a claim; the current one for a new claim; 0 if none has ended."""
    noted = select(func.max(state.rows.c.claimed_order)).where(state.rows.c.claimed_by == claim_id, state.mine)
    newest = select(func.max(sessions.c.ended_order))
    found = connection.execute(noted).scalar()
    return found if found is not None else connection.execute(newest).scalar() or 0


def _take(connection: Connection, wanted: LeaseRequest, now: float) -> list[str]:
    """Lock sessions to lease, whole groups together, in order of their ends."""
    query, rows = _free(connection, wanted, now), _state(wanted.queue).rows
    found = connection.execute(query.limit(wanted.limit).with_for_update(skip_locked=True, of=rows)).all()
    groups = {row.unit for row in found if row.unit is not None}
    members = _take_groups(connection, query.where(sessions.c.group_id.in_(groups)), rows) if groups else {}
    taken: dict[str, int] = {}
    for row in found:
        unit = {row.session_id: row.ended_order} if row.unit is None else members.pop(row.unit, {})
        if taken and len(taken | unit) > wanted.limit:
            break
        taken |= unit
    return sorted(taken, key=taken.__getitem__)


def _take_groups(connection: Connection, query: Select[Any], rows: Table) -> dict[str, dict[str, int]]:
    """Lock the free sessions of groups. Return by group the `ended_order` of its sessions, by id.

    If another transaction has locked a session of a group, the group is left to it or to the next claim.
    """
    pass_alone(connection, "claims of groups")  # two claims could otherwise lock a part of one group each
    wanted = connection.execute(query).all()
    locked = set(connection.execute(query.with_for_update(skip_locked=True, of=rows)).scalars())
    left = {row.unit for row in wanted if row.session_id not in locked}
    groups: dict[str, dict[str, int]] = defaultdict(dict)
    for row in wanted:
        if row.unit is not None and row.unit not in left:
            groups[row.unit][row.session_id] = row.ended_order
    return groups


def _held(state: _State, claim_id: str) -> Select[Any]:
    columns = state.rows.c
    return select(columns.session_id).where(
        columns.claimed_by == claim_id, columns.acknowledged_at.is_(None), state.mine
    )


def _acknowledge(connection: Connection, done: Acknowledgement) -> AcknowledgeResult:
    now, state = time.time(), _state(done.queue)
    rows = _lock(connection, state, done)
    lost: dict[str, str | None] = dict.fromkeys(_deleted(done, rows))
    lost |= {name: row.claimed_by for name, row in rows.items() if not _may_acknowledge(row, done.claim_id, now)}
    names = tuple(name for name in done.session_ids if name not in lost)
    new = and_(state.rows.c.session_id.in_(names), state.rows.c.acknowledged_at.is_(None))
    connection.execute(update(state.rows).where(new, state.mine).values(acknowledged_at=now))
    if names:
        _settle(connection, names, done.queue, now)
    return AcknowledgeResult(names, lost)


def _settle(connection: Connection, names: Sequence[str], queue: Queue, now: float) -> None:
    """Make the rows of acknowledged sessions agree.

    The rows of the server's own route follow `sessions`, so that `db prune` sees which routes are left. A session that
    only has turns of other routes leaves `sessions` with the last of them: the server's own queue never delivers it.
    """
    columns = session_routes.c
    if queue.route is None:
        own = and_(columns.session_id.in_(names), columns.route.not_in(queue.others))
        connection.execute(update(session_routes).where(own, QUEUED_ROUTES).values(acknowledged_at=now))
        return
    others = and_(columns.route.in_(queue.others), columns.acknowledged_at.is_not(None))
    left = exists().where(columns.session_id == sessions.c.session_id, columns.kind == _POLICY, not_(others))
    unheld = and_(sessions.c.session_id.in_(names), sessions.c.acknowledged_at.is_(None), not_(left))
    connection.execute(update(sessions).where(unheld).values(acknowledged_at=now))


def _lock(connection: Connection, state: _State, done: Acknowledgement) -> dict[str, Row[Any]]:
    columns = state.rows.c
    query = state.joined(
        select(sessions.c.session_id, sessions.c.ended_order, columns.claimed_by, columns.claimed_until)
        .add_columns(columns.acknowledged_at)
        .where(sessions.c.session_id.in_(done.session_ids))
        .order_by(sessions.c.session_id)
    )
    rows = {row.session_id: row for row in connection.execute(query.with_for_update(of=state.rows))}
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
        turns = "" if done.queue.route is None else f" with turns of route {brief(done.queue.route)}"
        raise SessionNotFound(f"there is no session {brief(gone[0])}{turns}", param="session_ids")
    return gone


def _may_acknowledge(row: Row[Any], claim_id: str | None, now: float) -> bool:
    """Return True if the claim still holds the session; without a claim id, if no lease runs or it is acknowledged."""
    if claim_id is not None:
        return bool(row.claimed_by == claim_id)
    held = row.claimed_until is not None and row.claimed_until > now
    return row.acknowledged_at is not None or not held
