"""`tokengrove db prune`: deletes old sessions that were exported, acknowledged or withdrawn, or have expired.

Whole sessions are deleted, and only if they ended long ago. All other sessions stay, including all live sessions. The
server never prunes by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, Engine, Select, and_, func, not_, or_, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from proxy.store import database, schema
from proxy.store.faults import reason_of
from proxy.store.sql.deletions import delete_rows
from proxy.store.sql.images import drop_strays
from proxy.store.sql.locks import is_deadlock
from proxy.store.sql.tables import interactions, sessions
from tokengrove.errors import ConfigurationError
from tokengrove.options.session import SessionStatus

# Sessions per transaction: locks are held briefly, and a crash leaves only whole sessions.
_BATCH = 200


@dataclass(frozen=True, slots=True)
class Pruned:
    """Counts of the deleted rows and tokens; in a dry run, of those that would be deleted.

    `kept`: sessions that are old enough but stay, because they were never exported or acknowledged.
    """

    sessions: int
    interactions: int
    tokens: int
    kept: int


def prune(
    database_url: str, older_than_s: float, *, dry_run: bool, progress: Callable[[int], None] = lambda _: None
) -> Pruned:
    """Delete sessions that ended more than `older_than_s` seconds ago, then shrink a SQLite file.

    `progress` is called with the number of deleted sessions.
    Raises ConfigurationError for a SQLite database that a server uses, and for a database at another revision.
    """
    url = database.parse_url(database_url)
    lock = schema.lock_file(url) if database.is_sqlite(url) else None
    try:
        engine = database.writer_engine(url)
        try:
            schema.prepare(engine, migrate=False)
            pruned = _prune(engine, time.time() - older_than_s, dry_run, progress)
        except SQLAlchemyError as error:
            raise ConfigurationError(
                f"the database {database.label(url)} cannot be pruned: {reason_of(error)}"
            ) from None
        finally:
            engine.dispose()
        if pruned.sessions and not dry_run:
            database.shrink(url)
        return pruned
    finally:
        if lock is not None:
            lock.release()


def _prune(engine: Engine, before: float, dry_run: bool, progress: Callable[[int], None]) -> Pruned:
    deleted = 0
    gone = and_(sessions.c.ended_at < before, sessions.c.status != SessionStatus.ACTIVE.value)
    # Sessions that their runner delivers leave the queue at their end, exported or not.
    acknowledged = and_(sessions.c.acknowledged_at.is_not(None), sessions.c.delivery.is_(None))
    done = or_(
        sessions.c.exported_at.is_not(None),
        acknowledged,
        sessions.c.withdrawn_at.is_not(None),
        sessions.c.status == SessionStatus.EXPIRED.value,
    )
    with engine.begin() as connection:
        pruned = _count(connection, and_(gone, done), and_(gone, not_(done)))
    query = select(sessions.c.session_id).where(gone, done).limit(_BATCH).with_for_update()
    while not dry_run and (some := _repeated(engine, lambda connection: _delete_some(connection, query))):
        deleted += some
        progress(deleted)
    while not dry_run and _repeated(engine, lambda connection: drop_strays(connection, _BATCH)):
        pass
    return pruned


def _delete_some(connection: Connection, query: Select[Any]) -> int:
    names = list(connection.execute(query).scalars())
    if names:
        delete_rows(connection, names)
    return len(names)


def _repeated(engine: Engine, change: Callable[[Connection], int]) -> int:
    """Make a change in a transaction; retry if it deadlocked with a server that locked the same images."""
    while True:
        try:
            with engine.begin() as connection:
                return change(connection)
        except DBAPIError as error:
            if not is_deadlock(error):
                raise


def _count(connection: Connection, pruned: ColumnElement[bool], kept: ColumnElement[bool]) -> Pruned:
    names = select(sessions.c.session_id).where(pruned)
    tokens = func.coalesce(func.sum(interactions.c.output_tokens + interactions.c.prompt_tokens), 0)
    prefixes = func.coalesce(func.sum(interactions.c.prefix_length), 0)
    query = select(func.count(), tokens - prefixes).where(interactions.c.session_id.in_(names))
    found, stored = connection.execute(query).one()
    count = select(func.count()).select_from(sessions)
    return Pruned(
        connection.execute(count.where(pruned)).scalar_one(),
        found,
        int(stored),
        connection.execute(count.where(kept)).scalar_one(),
    )
