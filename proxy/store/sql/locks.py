"""Row locks, always taken in one order: replicas that write the same sessions never wait for each other in a circle.

A SQLite database has one writer, which needs none of this: its transaction begins with the lock of the whole file.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any
from zlib import crc32

from sqlalchemy import BigInteger, Connection, func, literal, or_, select
from sqlalchemy.exc import DBAPIError

from proxy.errors import SessionNotFound
from proxy.store.news import Seen
from proxy.store.sql.tables import interactions, sessions

# SQLSTATEs deadlock_detected and serialization_failure. Locks in order leave few: two inserts of one new name.
_DEADLOCKS = ("40P01", "40001")


def lock_sessions(connection: Connection, names: Collection[str]) -> dict[str, Seen]:
    """How far each session is; its row is ours until the commit. Raises SessionNotFound."""
    query = (
        select(sessions.c.session_id, sessions.c.next_seq, sessions.c.revision)
        .where(sessions.c.session_id.in_(names))
        .order_by(sessions.c.session_id)
        .with_for_update()
    )
    found = {name: Seen(next_seq, revision) for name, next_seq, revision in connection.execute(query)}
    if len(found) < len(names):
        raise SessionNotFound(f"session {min(set(names) - found.keys())} does not exist")
    return found


def lock_all(connection: Connection, payloads: Iterable[Any]) -> None:
    """Lock every session that a group of changes is about, before the first of them is applied."""
    if connection.dialect.name == "sqlite":
        return
    names, ids = _concerned(payloads)
    if len(names) + len(ids) < 2:
        return
    of_interactions = select(interactions.c.session_id).where(interactions.c.id.in_(ids))
    query = (
        select(sessions.c.number)
        .where(or_(sessions.c.session_id.in_(names), sessions.c.session_id.in_(of_interactions)))
        .order_by(sessions.c.session_id)
        .with_for_update()
    )
    connection.execute(query).all()


def pass_alone(connection: Connection, place: str) -> None:
    """Wait until no other transaction is past this `place`; until the end of ours no other gets there."""
    if connection.dialect.name != "sqlite":
        number = literal(crc32(place.encode()), BigInteger)
        connection.execute(select(func.pg_advisory_xact_lock(number))).all()


def is_deadlock(error: DBAPIError) -> bool:
    """Whether the database ended a transaction so that another, which waited for it in a circle, can go on."""
    return getattr(error.orig, "sqlstate", None) in _DEADLOCKS


def _concerned(payloads: Iterable[Any]) -> tuple[set[str], set[str]]:
    """Ids of sessions, and ids of interactions whose sessions are meant."""
    names: set[str] = set()
    ids: set[str] = set()
    for payload in payloads:
        if isinstance(payload, str):
            ids.add(payload)
        elif isinstance(payload, tuple):
            ids.add(payload[0])
        elif isinstance(payload, Mapping):
            _add(names, payload.get("session_id"))
            _add(ids, payload.get("of_interaction"))
            names.update(payload.get("of_sessions", ()))
        else:
            _add(names, getattr(payload, "session_id", None))
            names.update(getattr(payload, "session_ids", ()))
    return names, ids


def _add(found: set[str], name: str | None) -> None:
    if name is not None:
        found.add(name)
