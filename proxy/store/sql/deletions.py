"""Deletes sessions with all their rows, in one transaction.

Two things stay, neither with content: the number of sessions that count for the staleness rule, and the hashes of their
keys. Without the hashes, an open server would create a new session for a key or path secret of a deleted one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from sqlalchemy import Connection, delete, func, insert, select

from proxy.store.sql.images import drop_images
from proxy.store.sql.starts import give_back_of_live, note_pruned
from proxy.store.sql.tables import (
    annotated,
    intents,
    interactions,
    returns,
    session_routes,
    sessions,
    side_columns,
    unreplied,
    withdrawn_keys,
)
from proxy.store.sql.texts import drop_texts
from proxy.store.sql.webhooks import tell_of_group
from tokengrove.errors import SessionNotFound, brief

_NOBODY = ""


@dataclass(frozen=True, slots=True)
class Deletion:
    """A session to delete. `webhooks`: URLs that are told of its group, which may be ready without it."""

    session_id: str
    webhooks: Sequence[str] = ()


def delete_rows(connection: Connection, names: Collection[str]) -> None:
    """Delete the rows of sessions, which have ended or are locked."""
    note_pruned(connection, names)
    drop_texts(connection, names)
    ids = select(interactions.c.id).where(interactions.c.session_id.in_(names))
    connection.execute(delete(returns).where(returns.c.interaction_id.in_(ids)))
    for table in (
        *(intents, unreplied, withdrawn_keys, side_columns, annotated, session_routes),
        *(interactions, sessions),
    ):
        connection.execute(delete(table).where(table.c.session_id.in_(names)))
    drop_images(connection, names)


def delete_sessions(connection: Connection, batch: Sequence[Deletion]) -> Sequence[int]:
    """Delete sessions; return the number of turns of each. Raises SessionNotFound."""
    return [_delete(connection, each) for each in batch]


def _delete(connection: Connection, deletion: Deletion) -> int:
    name = deletion.session_id
    row = connection.execute(select(sessions).where(sessions.c.session_id == name).with_for_update()).mappings().first()
    if row is None:
        raise SessionNotFound(f"there is no session {brief(name)}")
    count = select(func.count()).select_from(interactions).where(interactions.c.session_id == name)
    turns: int = connection.execute(count).scalar_one()
    withdrawn = select(withdrawn_keys.c.key_hash).where(withdrawn_keys.c.session_id == name)
    names = ("api_key_hash", "control_key_hash", "path_key_hash", "feedback_key_hash")
    hashes = {row[each] for each in names} - {None}
    hashes |= set(connection.execute(withdrawn).scalars())
    give_back_of_live(connection, name)
    with _overwriting(connection):
        delete_rows(connection, [name])
    refuse_keys(connection, hashes)
    if deletion.webhooks and row["ended_order"] is None:
        tell_of_group(connection, row["group_id"], deletion.webhooks)
    return turns


def refuse_keys(connection: Connection, hashes: Collection[str]) -> None:
    """Store the hashes of keys as withdrawn, without a session."""
    noted = select(withdrawn_keys.c.key_hash).where(
        withdrawn_keys.c.session_id == _NOBODY, withdrawn_keys.c.key_hash.in_(hashes)
    )
    new = set(hashes) - set(connection.execute(noted).scalars())
    if new:
        connection.execute(insert(withdrawn_keys), [{"key_hash": each, "session_id": _NOBODY} for each in sorted(new)])


@contextmanager
def _overwriting(connection: Connection) -> Iterator[None]:
    """Let SQLite overwrite data deleted in this context with zeros. By default it may stay in free pages."""
    if connection.dialect.name != "sqlite":
        yield
        return
    before = connection.exec_driver_sql("PRAGMA secure_delete").scalar_one()
    connection.exec_driver_sql("PRAGMA secure_delete=ON").close()
    try:
        yield
    finally:
        connection.exec_driver_sql(f"PRAGMA secure_delete={before}").close()
