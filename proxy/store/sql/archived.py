"""The index of archived sessions, and the steps in which a session moves between the database and a file.

A session is either in `sessions` or in `archived_sessions`, never in both: each step is one transaction. A step that
names a file locks its row, so a file is never deleted while a session moves to it.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from sqlalchemy import ColumnElement, Connection, RowMapping, Select, delete, exists, insert, select, update

from proxy.store.sql.deletions import delete_rows, refuse_keys
from proxy.store.sql.tables import (
    annotated,
    archive_files,
    archived_sessions,
    intents,
    interactions,
    returns,
    session_images,
    session_routes,
    sessions,
    side_columns,
    unreplied,
    withdrawn_keys,
)

_KEYS = ("api_key_hash", "control_key_hash", "path_key_hash", "feedback_key_hash")
_BESIDE = (intents, unreplied, withdrawn_keys, session_images, session_routes, annotated)


class State(StrEnum):
    """The state of a file; see `tables.archive_files`."""

    OPEN = "open"
    SETTLED = "settled"
    DOOMED = "doomed"


class Archived(NamedTuple):
    """Where an archived session is. `turns`: its interactions, of any status. `number`: its place in listings."""

    session_id: str
    file: str
    turns: int
    number: int


def find_archived(connection: Connection, session_ids: Collection[str]) -> dict[str, Archived]:
    """The archived sessions among at most 10,000 ids."""
    query = _entries().where(archived_sessions.c.session_id.in_(session_ids))
    return {row.session_id: Archived(*row) for row in connection.execute(query)}


def list_archived(connection: Connection, ended_before: float | None = None) -> list[Archived]:
    """All archived sessions in order of creation, or those that ended before a Unix time."""
    query = _entries().order_by(archived_sessions.c.number)
    if ended_before is not None:
        query = query.where(archived_sessions.c.ended_at < ended_before)
    return [Archived(*row) for row in connection.execute(query)]


def in_order(connection: Connection, session_ids: Collection[str]) -> list[str]:
    """The existing sessions among at most 10,000 ids, archived or not, in order of creation."""
    found: list[tuple[int, str]] = []
    for table in (sessions, archived_sessions):
        query = select(table.c.number, table.c.session_id).where(table.c.session_id.in_(session_ids))
        found += [(number, name) for number, name in connection.execute(query)]
    return [name for _, name in sorted(found)]


def names() -> Select[tuple[str]]:
    """The query for the ids of all archived sessions."""
    return select(archived_sessions.c.session_id)


def names_in(connection: Connection, file: str) -> set[str]:
    """The sessions whose file this is."""
    query = select(archived_sessions.c.session_id).where(archived_sessions.c.file == file)
    return set(connection.execute(query).scalars())


def unsettled(connection: Connection) -> list[tuple[str, State]]:
    """The files that a crash left open or doomed, oldest first."""
    query = select(archive_files.c.file, archive_files.c.state).where(archive_files.c.state != State.SETTLED.value)
    return [(file, State(state)) for file, state in connection.execute(query.order_by(archive_files.c.created_at))]


def open_file(connection: Connection, file: str) -> None:
    """Note a file that is about to be written."""
    connection.execute(insert(archive_files).values(file=file, state=State.OPEN.value, created_at=time.time()))


def set_state(connection: Connection, file: str, state: State) -> None:
    """Change the state of a file."""
    connection.execute(update(archive_files).where(archive_files.c.file == file).values(state=state.value))


def doom(connection: Connection, file: str) -> bool:
    """Mark a file for deletion. False if a session is in it."""
    _lock_file(connection, file)
    if connection.execute(select(exists().where(archived_sessions.c.file == file))).scalar():
        return False
    set_state(connection, file, State.DOOMED)
    return True


def forget_file(connection: Connection, file: str) -> None:
    """Remove the row of a file that was deleted."""
    connection.execute(delete(archive_files).where(archive_files.c.file == file))


def move_out(
    connection: Connection, session_id: str, fingerprint: bytes, file: str, still: ColumnElement[bool]
) -> bool:
    """Delete a session's rows and note the file that has them. False if it changed since `fingerprint` was taken.

    `still`: a condition on `sessions` that it must still meet.
    """
    query = select(sessions).where(sessions.c.session_id == session_id, still).with_for_update()
    row = connection.execute(query).mappings().first()
    if row is None or fingerprint != fingerprint_of(connection, row):
        return False
    if _lock_file(connection, file) is not State.OPEN:
        return False
    hashes = {row[name] for name in _KEYS} - {None}
    replaced = select(withdrawn_keys.c.key_hash).where(withdrawn_keys.c.session_id == session_id)
    hashes |= set(connection.execute(replaced).scalars())
    delete_rows(connection, [session_id])
    kept = ("session_id", "number", "task_id", "group_id", "ended_at")
    values = {**{name: row[name] for name in kept}, "turns": row["next_seq"], "file": file, "archived_at": time.time()}
    connection.execute(insert(archived_sessions).values(values))
    if hashes:
        gone = [{"key_hash": each, "session_id": session_id} for each in sorted(hashes)]
        connection.execute(insert(withdrawn_keys), gone)
    return True


def note_archived(connection: Connection, row: Mapping[str, Any], keys: Sequence[Mapping[str, Any]]) -> None:
    """Note an archived session of another database, with the hashes of its keys, unless its id is taken."""
    for table in (sessions, archived_sessions):
        if connection.execute(select(exists().where(table.c.session_id == row["session_id"]))).scalar():
            return
    if _lock_file(connection, row["file"]) is None:
        open_file(connection, row["file"])
        set_state(connection, row["file"], State.SETTLED)
    connection.execute(insert(archived_sessions).values(dict(row)))
    if keys:
        connection.execute(insert(withdrawn_keys), [dict(each) for each in keys])


def move_in(connection: Connection, session_id: str) -> int | None:
    """Forget that a session is archived, before its rows are added again. Returns its number if that is free.

    Its file becomes `open`. Raises LookupError if the session is not archived.
    """
    query = select(archived_sessions).where(archived_sessions.c.session_id == session_id)
    row = connection.execute(query.with_for_update()).mappings().first()
    if row is None:
        raise LookupError(session_id)
    set_state(connection, row["file"], State.OPEN)
    connection.execute(delete(archived_sessions).where(archived_sessions.c.session_id == session_id))
    connection.execute(delete(withdrawn_keys).where(withdrawn_keys.c.session_id == session_id))
    taken = connection.execute(select(exists().where(sessions.c.number == row["number"]))).scalar()
    return None if taken else int(row["number"])


def drop_archived(connection: Connection, names: Collection[str], *, refusing_keys: bool) -> None:
    """Forget archived sessions. `refusing_keys`: as after a deletion, their keys are refused from now on."""
    of_these = withdrawn_keys.c.session_id.in_(names)
    hashes = set(connection.execute(select(withdrawn_keys.c.key_hash).where(of_these)).scalars())
    connection.execute(delete(withdrawn_keys).where(of_these))
    if refusing_keys:
        refuse_keys(connection, hashes)
    connection.execute(delete(archived_sessions).where(archived_sessions.c.session_id.in_(names)))


def replace_file(connection: Connection, old: str, new: str) -> None:
    """Let a new file, which has the same sessions, take the place of an old one. Raises LookupError if it is gone."""
    if _lock_file(connection, new) is not State.OPEN:
        raise LookupError(new)
    connection.execute(update(archived_sessions).where(archived_sessions.c.file == old).values(file=new))
    set_state(connection, new, State.SETTLED)
    set_state(connection, old, State.DOOMED)


def fingerprint_of(connection: Connection, row: RowMapping) -> bytes:
    """A digest that differs if any row of a session has changed; turns change only with the row of the session."""
    name, of_turns = row["session_id"], select(interactions.c.id).where(interactions.c.session_id == row["session_id"])
    parts = [select(returns).where(returns.c.interaction_id.in_(of_turns))]
    parts += [select(table).where(table.c.session_id == name) for table in _BESIDE]
    aside = [side_columns.c[each] for each in ("interaction_id", "name", "checksum")]
    parts.append(select(*aside).where(side_columns.c.session_id == name))
    digest = hashlib.sha256(repr(tuple(row.values())).encode())
    for query in parts:
        for found in sorted(repr(tuple(each)) for each in connection.execute(query)):
            digest.update(found.encode())
    return digest.digest()


def _entries() -> Select[Any]:
    return select(*(archived_sessions.c[name] for name in Archived._fields))


def _lock_file(connection: Connection, file: str) -> State | None:
    """Lock the row of a file; return its state, None if there is none."""
    query = select(archive_files.c.state).where(archive_files.c.file == file).with_for_update()
    state = connection.execute(query).scalar()
    return None if state is None else State(state)
