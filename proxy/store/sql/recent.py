"""The sessions that ended last, newest first, by the order of ends that claims use."""

from __future__ import annotations

from sqlalchemy import Connection, select

from proxy.store.ended import Ended
from proxy.store.sql.tables import sessions


def last_ended(connection: Connection, most: int) -> list[Ended]:
    """At most `most` sessions."""
    columns = sessions.c
    query = (
        select(columns.session_id, columns.updated_at, columns.next_seq)
        .where(columns.ended_order.is_not(None))
        .order_by(columns.ended_order.desc())
        .limit(most)
    )
    return [Ended(*row) for row in connection.execute(query)]
