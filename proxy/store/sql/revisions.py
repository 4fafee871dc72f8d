"""Queries for the changes of a session since a replica last read it."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, select

from proxy.store.news import MutableFields, News, Seen
from proxy.store.sql import codec, reads, rows
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import interactions, sessions
from proxy.types import SessionStatus, Status

_STATES = Statement(
    select(sessions.c.session_id, sessions.c.next_seq, sessions.c.revision).where(Named(sessions.c.session_id))
)


def load_states(connection: Connection, session_ids: Collection[str]) -> dict[str, Seen]:
    """The states of those sessions that exist."""
    rows = _STATES.fetch(connection, {"names": json_list(session_ids)})
    return {name: Seen(next_seq, revision) for name, next_seq, revision in rows}


def load_news(connection: Connection, session_id: str, seen: Seen) -> News | None:
    """The changes since `seen`; None if there is no such session. One short query if nothing changed."""
    query = select(sessions.c.next_seq, sessions.c.revision).where(sessions.c.session_id == session_id)
    found = connection.execute(query).first()
    if found is None:
        return None
    now = Seen(*found)
    grown = now.next_seq > seen.next_seq
    new = reads.load_interactions(connection, session_id, seen.next_seq - 1, None) if grown else []
    unreplied = reads.load_unreplied(connection, session_id) if new else set()
    if now.revision == seen.revision:
        return News(now, None, new, unreplied, ())
    return News(now, reads.load_session(connection, session_id), new, unreplied, _changed(connection, session_id, seen))


def live_sessions(connection: Connection, session_ids: Collection[str]) -> set[str]:
    """Those of `session_ids` that have not ended. At most MAX_SESSION_IDS."""
    query = select(sessions.c.session_id).where(
        sessions.c.session_id.in_(session_ids), sessions.c.status == SessionStatus.ACTIVE.value
    )
    return set(connection.execute(query).scalars())


def _changed(connection: Connection, session_id: str, seen: Seen) -> list[MutableFields]:
    columns = interactions.c
    query = select(
        *(columns.id, columns.status, columns.reward, columns.rewards, columns.token_rewards),
        *(columns.trainable, columns.spans),
    ).where(columns.session_id == session_id, columns.seq < seen.next_seq)
    return [
        MutableFields(
            row["id"],
            Status(row["status"]),
            row["reward"],
            codec.decode_json(row["rewards"], {}),
            None if row["token_rewards"] is None else codec.decode_floats(row["token_rewards"]),
            row["trainable"],
            rows.pairs_of(row["spans"]),
        )
        for row in connection.execute(query).mappings()
    ]
