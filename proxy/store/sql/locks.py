"""Row locks, always taken in the same order, so that replicas that write the same sessions do not deadlock.

SQLite needs none of this: it has one writer, whose transactions begin with the lock of the whole file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from zlib import crc32

from sqlalchemy import BigInteger, Connection, bindparam, func, select, union
from sqlalchemy.exc import DBAPIError

from proxy.store.news import Seen
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import interactions, sessions
from tokengrove.errors import SessionNotFound

# SQLSTATEs deadlock_detected and serialization_failure. With ordered locks, only two inserts of one new session id
# cause them.
_DEADLOCKS = ("40P01", "40001")
_LOCK = Statement(
    select(sessions.c.session_id, sessions.c.next_seq, sessions.c.revision)
    .where(Named(sessions.c.session_id))
    .order_by(sessions.c.session_id)
    .with_for_update()
)
_named = sessions.alias("named")
# A union: with `OR`, PostgreSQL would compare every session with both.
_LOCK_ALL = Statement(
    select(sessions.c.number)
    .where(
        sessions.c.session_id.in_(
            union(
                select(_named.c.session_id).where(Named(_named.c.session_id)),
                select(interactions.c.session_id).where(Named(interactions.c.id, "ids")),
            )
        )
    )
    .order_by(sessions.c.session_id)
    .with_for_update()
)
_PASS_ALONE = Statement(select(func.pg_advisory_xact_lock(bindparam("place", type_=BigInteger))))


def lock_sessions(connection: Connection, names: Collection[str]) -> dict[str, Seen]:
    """Lock session rows until the commit, and return the state of each. Raises SessionNotFound."""
    rows = _LOCK.fetch(connection, {"names": json_list(names)})
    found = {name: Seen(next_seq, revision) for name, next_seq, revision in rows}
    if len(found) < len(names):
        raise SessionNotFound(f"session {min(set(names) - found.keys())} does not exist")
    return found


def lock_all(connection: Connection, payloads: Iterable[Any]) -> None:
    """Lock every session that a group of changes concerns, before the first change is applied. Not for SQLite."""
    names, ids = _concerned(payloads)
    if len(names) + len(ids) < 2:
        return
    _LOCK_ALL.run(connection, [{"names": json_list(names), "ids": json_list(ids)}])


def pass_alone(connection: Connection, place: str) -> None:
    """Take an advisory lock named `place` until the end of the transaction. One transaction at a time holds it."""
    if connection.dialect.name != "sqlite":
        _PASS_ALONE.fetch(connection, {"place": crc32(place.encode())})


def is_deadlock(error: Exception) -> bool:
    """Return True if the database aborted the transaction to resolve a deadlock."""
    return isinstance(error, DBAPIError) and getattr(error.orig, "sqlstate", None) in _DEADLOCKS


def is_disconnect(error: Exception) -> bool:
    """Return True if the connection is dead."""
    return isinstance(error, DBAPIError) and error.connection_invalidated


def _concerned(payloads: Iterable[Any]) -> tuple[set[str], set[str]]:
    """The session ids that changes concern, and the interaction ids whose sessions they concern."""
    names: set[str] = set()
    ids: set[str] = set()
    for payload in payloads:
        if isinstance(payload, str):
            ids.add(payload)
        elif isinstance(payload, Mapping):  # a note that a call began concerns no session's row
            names.update(payload.get("of_sessions", ()))
        elif hasattr(payload, "session_id"):
            names.add(payload.session_id)
        else:
            names.update(getattr(payload, "session_ids", ()))
    return names, ids
