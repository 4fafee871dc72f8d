"""The outbox of webhooks: an event is inserted in the transaction of the change that it tells of.

A row is one event for one receiver. It is taken under a lease (`due_at` is then the end of the lease), so that a
delivery that a crash interrupted is made again, and deleted when the receiver has accepted it: at least once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson
from sqlalchemy import Connection, and_, delete, func, insert, null, select, update

from proxy.store.deliveries import Delivery, Event, Settled, Take, Told
from proxy.store.sql.locks import pass_alone
from proxy.store.sql.tables import sessions, webhook_deliveries

_KEPT_S = 30 * 86_400.0
_columns = webhook_deliveries.c


def tell(connection: Connection, batch: Sequence[Told]) -> Sequence[None]:
    """Insert events, one row for each of their receivers."""
    for told in batch:
        now, name = time.time(), f"evt_{uuid.uuid4().hex}"
        content = {
            "type": told.event.value,
            "timestamp": datetime.fromtimestamp(now, UTC).isoformat(),
            "data": dict(told.data),
        }
        row: dict[str, Any] = {"id": name, "event": told.event.value, "body": orjson.dumps(content).decode()}
        row |= {"created_at": now, "attempts": 0, "due_at": now}
        connection.execute(insert(webhook_deliveries), [{**row, "url": url} for url in told.urls])
    return [None] * len(batch)


def tell_of_end(connection: Connection, row: Mapping[str, Any], urls: Sequence[str]) -> None:
    """Tell that the session of a sealed row has ended, and whether that makes its group ready to be claimed."""
    names = ("session_id", "task_id", "group_id", "status", "outcome", "exit_reason")
    data = {name: row[name] for name in names} | {"withdrawn": row["withdrawn_at"] is not None}
    tell(connection, [Told(Event.SESSION_ENDED, data, urls)])
    tell_of_group(connection, row["group_id"], urls)


def tell_of_group(connection: Connection, group_id: str | None, urls: Sequence[str]) -> None:
    """Tell that a group is ready, if all its sessions have ended and are as many as its size.

    Call it after a change that may make it so. Sessions that no claim delivers are no members, as in `claims`.
    """
    if group_id is None:
        return
    pass_alone(connection, "ended order")  # the last of two changes on two replicas must see the other
    columns = sessions.c
    members = and_(columns.group_id == group_id, columns.delivery.is_(None), columns.withdrawn_at.is_(None))
    query = select(columns.session_id, columns.ended_order, columns.group_size).where(members)
    found = connection.execute(query.order_by(columns.ended_order)).all()
    size = max((row.group_size for row in found if row.group_size is not None), default=None)
    if size is None or len(found) < size or any(row.ended_order is None for row in found):
        return
    data = {"group_id": group_id, "group_size": size, "session_ids": [row.session_id for row in found]}
    tell(connection, [Told(Event.GROUP_READY, data, urls)])


def tell_of_rewards(connection: Connection, session_id: str, names: Collection[str], urls: Sequence[str]) -> None:
    """Tell of rewards of these interactions, if their session has ended. Its row is locked."""
    query = select(sessions.c.ended_order, sessions.c.group_id).where(sessions.c.session_id == session_id)
    row = connection.execute(query).one()
    if row.ended_order is not None:
        data = {"session_id": session_id, "group_id": row.group_id, "interaction_ids": list(names)}
        tell(connection, [Told(Event.REWARD_LATE, data, urls)])


def take(connection: Connection, batch: Sequence[Take]) -> Sequence[list[Delivery]]:
    """Take deliveries, the oldest first; other servers skip those that this transaction has locked."""
    return [_take(connection, each) for each in batch]


def _take(connection: Connection, wanted: Take) -> list[Delivery]:
    now = time.time()
    due = select(*_columns).where(_columns.url == wanted.url, _columns.due_at <= now).order_by(_columns.due_at)
    found = connection.execute(due.limit(wanted.most).with_for_update(skip_locked=True)).all()
    taken = [Delivery(*row) for row in found]
    if taken:
        mine = and_(_columns.url == wanted.url, _columns.id.in_([each.id for each in taken]))
        values = {"attempts": _columns.attempts + 1, "due_at": now + wanted.lease_s}
        connection.execute(update(webhook_deliveries).where(mine).values(values))
    return [each._replace(attempts=each.attempts + 1) for each in taken]


def settle(connection: Connection, batch: Sequence[Sequence[Settled]]) -> Sequence[None]:
    """Delete deliveries that were accepted; note the next attempt of the others, or that they are dead letters."""
    for each in (one for settled in batch for one in settled):
        this = and_(_columns.id == each.id, _columns.url == each.url)
        if each.error is None:
            connection.execute(delete(webhook_deliveries).where(this))
            continue
        values = {"error": each.error, "due_at": each.due_at}
        connection.execute(update(webhook_deliveries).where(this).values(values))
        if each.due_at is None:
            old = and_(_columns.due_at.is_(None), _columns.created_at < time.time() - _KEPT_S)
            connection.execute(delete(webhook_deliveries).where(old))
    return [None] * len(batch)


def resend(connection: Connection, batch: Sequence[Sequence[str] | None]) -> Sequence[int]:
    """Make dead letters due, by the ids of their events (None: all). Return how many deliveries were so."""
    counts = []
    for names in batch:
        dead = update(webhook_deliveries).where(_columns.due_at.is_(None))
        if names is not None:
            dead = dead.where(_columns.id.in_(names))
        counts.append(connection.execute(dead.values(due_at=time.time(), attempts=0)).rowcount)
    return counts


def next_due(connection: Connection, url: str) -> float | None:
    """When the first delivery to a URL is due, in Unix seconds; None if none is left."""
    due: float | None = connection.execute(select(func.min(_columns.due_at)).where(_columns.url == url)).scalar()
    return due


def listed(connection: Connection, dead: bool, most: int) -> tuple[int, list[Delivery]]:
    """The number of dead letters, or of deliveries that wait, and the newest of them."""
    state = _columns.due_at.is_(null()) if dead else _columns.due_at.is_not(null())
    count: int = connection.execute(select(func.count()).select_from(webhook_deliveries).where(state)).scalar_one()
    newest = select(*_columns).where(state).order_by(_columns.created_at.desc(), _columns.id, _columns.url)
    return count, [Delivery(*row) for row in connection.execute(newest.limit(most))]
