"""The sessions that ended last, newest first, by the order of ends that claims use."""

from __future__ import annotations

from sqlalchemy import Connection, select

from proxy.store.ended import Ended
from proxy.store.sql.tables import sessions

_LOOKED_AT = 5
"""At most this many times the requested sessions are read; sessions that are not for training are then left out."""


def last_ended(connection: Connection, most: int) -> list[Ended]:
    """At most `most` sessions, without validation sessions and withdrawn ones.

    A recent evaluation with thousands of sessions may leave fewer.
    """
    columns = sessions.c
    newest = (
        select(columns.session_id, columns.updated_at, columns.next_seq, columns.ended_order, columns.validation)
        .where(columns.ended_order.is_not(None), columns.withdrawn_at.is_(None))
        .order_by(columns.ended_order.desc())
        .limit(_LOOKED_AT * most)
        .subquery()
    )
    query = (
        select(newest.c.session_id, newest.c.updated_at, newest.c.next_seq)
        .where(newest.c.validation.is_(False))
        .order_by(newest.c.ended_order.desc())
        .limit(most)
    )
    return [Ended(*row) for row in connection.execute(query)]
