"""The notes of calls that have begun and not ended, each with the process that runs it.

If a process dies, its call is superseded when another process answers an equal later request of the session; that
commit marks the note. A marked call whose process lives still counts, because it will end by itself.

Each read queries the database for live processes, so a death may be noticed late. A SQLite file has one server at a
time, which disowns the notes of earlier servers. On PostgreSQL, the connections of a process are named after it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, bindparam, delete, exists, insert, or_, select, true, update
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from proxy.store.sql import rows
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import intents
from proxy.types import Interaction
from tokengrove.reasons import Status

# The third word of the application name that `database` gives the connections of a process.
_NAMED_AFTER = "split_part({}, ' ', 3)"


class _Lives(ColumnElement[bool]):
    """True if the process that runs a call lives."""

    inherit_cache = True


@compiles(_Lives, "sqlite")
def _lives_sqlite(_element: _Lives, compiler: SQLCompiler, **options: Any) -> str:
    return f"{compiler.process(intents.c.owner, **options)} IS NOT NULL"


@compiles(_Lives, "postgresql")
def _lives_postgresql(_element: _Lives, compiler: SQLCompiler, **options: Any) -> str:
    owner = compiler.process(intents.c.owner, **options)
    named = f"datname = current_database() AND {_NAMED_AFTER.format('application_name')} = {owner}"
    return f"EXISTS (SELECT 1 FROM pg_stat_activity WHERE {named})"


class _OfOthers(ColumnElement[bool]):
    """True if another process began a call."""

    inherit_cache = True


@compiles(_OfOthers, "sqlite")
def _of_others_sqlite(_element: _OfOthers, compiler: SQLCompiler, **options: Any) -> str:
    return f"{compiler.process(intents.c.owner, **options)} IS NULL"


@compiles(_OfOthers, "postgresql")
def _of_others_postgresql(_element: _OfOthers, compiler: SQLCompiler, **options: Any) -> str:
    own = _NAMED_AFTER.format("current_setting('application_name')")
    return f"{compiler.process(intents.c.owner, **options)} IS DISTINCT FROM {own}"


_INSERT = Statement(insert(intents))
_DELETE = Statement(delete(intents).where(Named(intents.c.interaction_id)))
_MARK = Statement(
    update(intents)
    .values(answered=true())
    .where(
        intents.c.session_id == bindparam("of_session"),
        or_(intents.c.request_hash == bindparam("of_hash"), intents.c.idempotency_key == bindparam("of_key")),
        intents.c.begun_at <= bindparam("asked_at"),
        _OfOthers(),
    )
)
LIVES = _Lives()
"""True for calls whose process lives: they run, or their end is not stored yet."""
PENDING = or_(intents.c.answered.is_(None), LIVES)
"""True for calls that have begun and not ended and were not superseded."""


def note_of(
    interaction_id: str, session_id: str, request_hash: str, idempotency_key: str | None, owner: str
) -> rows.RowValues:
    """The row of a call that begins now. `owner`: the process that runs it."""
    return {
        "interaction_id": interaction_id,
        "session_id": session_id,
        "begun_at": time.time(),
        "request_hash": request_hash,
        "idempotency_key": idempotency_key,
        "owner": owner,
    }


def insert_intents(connection: Connection, new: Sequence[rows.RowValues]) -> Sequence[None]:
    """Insert notes of begun calls, one per call."""
    by_id = {row["interaction_id"]: row for row in new}
    delete_intents(connection, list(by_id))
    _INSERT.run(connection, list(by_id.values()))
    return [None] * len(new)


def delete_intents(connection: Connection, interaction_ids: Sequence[str]) -> Sequence[None]:
    """Delete the notes of calls that have ended, or whose session was deleted."""
    _DELETE.run(connection, [{"names": json_list(interaction_ids)}])
    return [None] * len(interaction_ids)


def mark_answered(connection: Connection, new: Iterable[Interaction]) -> None:
    """Mark calls of other processes that began before an equal request, which a complete interaction of `new` answers.

    The caller has locked their sessions.
    """
    answers = []
    for node in new:
        if node.status is Status.COMPLETE:
            answers.append(
                {
                    "of_session": node.session_id,
                    "of_hash": node.request_hash,
                    "of_key": node.idempotency_key,
                    "asked_at": node.created_at,
                }
            )
    if answers:
        _MARK.run(connection, answers)


def disown_all(engine: Engine) -> bool:
    """Clear the process of all begun calls, for a SQLite file whose lock this process holds: the others have ended.

    Return whether there are any.
    """
    with engine.begin() as connection:
        connection.execute(update(intents).where(intents.c.owner.is_not(None)).values(owner=None))
        return bool(connection.scalar(select(exists().where(intents.c.interaction_id.is_not(None)))))
