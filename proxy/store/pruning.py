"""`tokengrove db prune`: deletes old sessions that were exported, acknowledged or withdrawn, or have expired.

Whole sessions are deleted, or only their side columns, and only if they ended long ago. All other sessions stay,
including all live sessions. A server does so only with rules of retention (`sessions.retention`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from sqlalchemy import ColumnElement, Connection, Engine, and_, exists, func, not_, or_, select
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from proxy.store import database, schema
from proxy.store.faults import reason_of
from proxy.store.sql.annotated import drop_stray_annotations
from proxy.store.sql.deletions import delete_rows
from proxy.store.sql.images import drop_strays
from proxy.store.sql.locks import is_deadlock
from proxy.store.sql.session_routes import drop_stray_routes
from proxy.store.sql.side_columns import count_strays, drop_columns, drop_stray_columns
from proxy.store.sql.tables import QUEUED_ROUTES, interactions, session_routes, sessions, side_columns
from proxy.store.sql.texts import purge
from tokengrove.errors import ConfigurationError
from tokengrove.options.model import RouteKind
from tokengrove.options.session import SessionStatus

T = TypeVar("T")
Condition = ColumnElement[bool]
"""A condition on `sessions`."""

# Sessions per transaction: locks are held briefly, and a crash leaves only whole sessions.
_BATCH = 200


@dataclass(frozen=True, slots=True)
class Pruned:
    """Counts of the deleted rows and tokens; in a dry run, of those that would be deleted.

    `kept`: sessions that are old enough but stay, because they were never exported or acknowledged. `columns`: side
    columns of the sessions, with `column_bytes` bytes of rows. `strays`: side columns without a turn. If only columns
    are deleted, `sessions` and `kept` count the sessions that have some.
    """

    sessions: int
    interactions: int
    tokens: int
    kept: int
    columns: int = 0
    column_bytes: int = 0
    strays: int = 0


def prune(
    database_url: str,
    older_than_s: float,
    *,
    dry_run: bool,
    only_columns: bool = False,
    progress: Callable[[int], None] = lambda _: None,
) -> Pruned:
    """Delete sessions that ended more than `older_than_s` seconds ago, then shrink a SQLite file.

    `only_columns`: keep the sessions, and delete only their side columns. `progress` is called with the number of
    sessions so far.
    Raises ConfigurationError for a SQLite database that a server uses, and for a database at another revision.
    """
    url = database.parse_url(database_url)
    lock = schema.lock_file(url) if database.is_sqlite(url) else None
    try:
        engine = database.writer_engine(url)
        try:
            schema.prepare(engine, migrate=False)
            before = time.time() - older_than_s
            pruned = _prune(engine, chosen(before, only_columns=only_columns), dry_run, progress)
        except SQLAlchemyError as error:
            raise ConfigurationError(
                f"the database {database.label(url)} cannot be pruned: {reason_of(error)}"
            ) from None
        finally:
            engine.dispose()
        if (pruned.sessions or pruned.strays) and not dry_run:
            database.shrink(url)
        return pruned
    finally:
        if lock is not None:
            lock.release()


@dataclass(frozen=True, slots=True)
class Chosen:
    """Conditions on `sessions`: `pruned` go, `kept` were never exported. `delete` takes the ids of some that go."""

    pruned: ColumnElement[bool]
    kept: ColumnElement[bool]
    only_columns: bool

    def delete(self, connection: Connection, names: Sequence[str]) -> None:
        if self.only_columns:
            drop_columns(connection, names)
        else:
            delete_rows(connection, names)


def chosen(before: float, *, only_columns: bool = False) -> Chosen:
    """The sessions that ended before a Unix time; with `only_columns`, those that have side columns."""
    gone = and_(sessions.c.ended_at < before, sessions.c.status != SessionStatus.ACTIVE.value)
    # Sessions that their runner delivers leave the queue at their end, exported or not.
    of_session = session_routes.c.session_id == sessions.c.session_id
    acknowledged = and_(
        sessions.c.acknowledged_at.is_not(None),
        sessions.c.delivery.is_(None),
        ~exists().where(of_session, QUEUED_ROUTES),
    )
    # An export may be of one trained route only. The trainers of the others have queues of their own.
    trained = select(func.count()).where(of_session, session_routes.c.kind == RouteKind.POLICY.value).scalar_subquery()
    done = or_(
        and_(sessions.c.exported_at.is_not(None), trained <= 1),
        acknowledged,
        sessions.c.withdrawn_at.is_not(None),
        sessions.c.status == SessionStatus.EXPIRED.value,
    )
    if only_columns:
        gone = and_(gone, exists().where(side_columns.c.session_id == sessions.c.session_id))
    return Chosen(and_(gone, done), and_(gone, not_(done)), only_columns)


def due_before(before: float, *, unexported: bool) -> Condition:
    """The condition for sessions to be pruned; with `unexported`, also for ones that were never exported."""
    which = chosen(before)
    return or_(which.pruned, which.kept) if unexported else which.pruned


def _prune(engine: Engine, chosen: Chosen, dry_run: bool, progress: Callable[[int], None]) -> Pruned:
    deleted = 0
    with engine.begin() as connection:
        pruned = _count(connection, chosen)
    while not dry_run and (some := repeated(engine, lambda connection: _delete_some(connection, chosen))):
        deleted += some
        progress(deleted)
    if deleted:
        repeated(engine, purge)
    for drop in (drop_strays, drop_stray_columns, drop_stray_routes, drop_stray_annotations):
        while not dry_run and repeated(engine, partial(drop, most=_BATCH)):
            pass
    return pruned


def _delete_some(connection: Connection, chosen: Chosen) -> int:
    query = select(sessions.c.session_id).where(chosen.pruned).limit(_BATCH).with_for_update()
    names = list(connection.execute(query).scalars())
    if names:
        chosen.delete(connection, names)
    return len(names)


def repeated(engine: Engine, change: Callable[[Connection], T]) -> T:
    """Make a change in a transaction; retry if it deadlocked with a server that locked the same images."""
    while True:
        try:
            with engine.begin() as connection:
                return change(connection)
        except DBAPIError as error:
            if not is_deadlock(error):
                raise


def _count(connection: Connection, chosen: Chosen) -> Pruned:
    names = select(sessions.c.session_id).where(chosen.pruned)
    tokens = func.coalesce(func.sum(interactions.c.output_tokens + interactions.c.prompt_tokens), 0)
    prefixes = func.coalesce(func.sum(interactions.c.prefix_length), 0)
    query = select(func.count(), tokens - prefixes).where(interactions.c.session_id.in_(names))
    found, stored = connection.execute(query).one()
    count = select(func.count()).select_from(sessions)
    size = func.coalesce(func.sum(func.length(side_columns.c.data)), 0)
    of_these = select(func.count(), size).where(side_columns.c.session_id.in_(names))
    columns, column_bytes = connection.execute(of_these).one()
    return Pruned(
        sessions=connection.execute(count.where(chosen.pruned)).scalar_one(),
        interactions=0 if chosen.only_columns else found,
        tokens=0 if chosen.only_columns else int(stored),
        kept=connection.execute(count.where(chosen.kept)).scalar_one(),
        columns=columns,
        column_bytes=int(column_bytes),
        strays=count_strays(connection),
    )
