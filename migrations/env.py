"""Runs migrations on the connection that `proxy.store.schema` passes, while servers use the database.

After a crash the database is at some revision as a whole, never between two: on SQLite all migrations are one
transaction, on PostgreSQL each is one. There nothing waits long for a lock, because every turn would wait behind it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from alembic import context
from alembic.runtime.migration import MigrationContext, MigrationInfo
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Select, column, delete, event, func, insert, inspect, select, table, text

from proxy.store import database
from proxy.store.sql.tables import compatibility, metadata
from tokengrove.errors import ConfigurationError

# An arbitrary number, the same in every tokengrove: replicas that start together migrate one after another.
ADVISORY_LOCK = 7_046_029
# How long turns wait behind a migration that waits for the lock of a table.
LOCK_TIMEOUT = "200ms"
_POLL_S = 0.2


def run(connection: Connection) -> None:
    """Migrate. On PostgreSQL alone; raises DBAPIError (lock_not_available) if a transaction holds a table for long."""
    if connection.dialect.name != "postgresql":
        _run(connection)
        return
    with _alone(connection):
        _refuse_while_older_servers_run(connection)
        with _impatience(connection):
            _run(connection)


def _run(connection: Connection) -> None:
    context.configure(
        connection=connection,
        target_metadata=metadata,
        transactional_ddl=True,
        transaction_per_migration=connection.dialect.name == "postgresql",
        on_version_apply=_note_compatibility,
    )
    with context.begin_transaction():
        context.run_migrations()


@contextmanager
def _alone(connection: Connection) -> Iterator[None]:
    """Hold the advisory lock. A transaction that waited for it would hold up indexes that are built concurrently."""
    while not connection.execute(select(func.pg_try_advisory_lock(ADVISORY_LOCK))).scalar():
        connection.rollback()
        time.sleep(_POLL_S)
    try:
        connection.commit()
        yield
    finally:
        connection.rollback()
        connection.execute(select(func.pg_advisory_unlock(ADVISORY_LOCK)))
        connection.commit()


@contextmanager
def _impatience(connection: Connection) -> Iterator[None]:
    """Let transactions wait briefly for each lock; an index that is built concurrently holds up nobody and may wait."""
    connection.execute(text("SET lock_timeout = 0"))
    connection.commit()
    event.listen(connection, "begin", _wait_briefly)
    try:
        yield
    finally:
        connection.rollback()
        event.remove(connection, "begin", _wait_briefly)
        connection.execute(text("RESET lock_timeout"))
        connection.commit()


def _wait_briefly(connection: Connection) -> None:
    connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT}'")


def _refuse_while_older_servers_run(connection: Connection) -> None:
    """Raise ConfigurationError if servers are connected that would not run on the database after the migrations."""
    oldest = _oldest_server(context.script, "head")
    connected: Select[str] = select(column("application_name")).select_from(table("pg_stat_activity"))
    names = connection.execute(connected.where(text("datname = current_database()"))).scalars()
    # Names of other users' connections may be hidden.
    revisions = sorted(filter(None, (database.revision_of(name) for name in names if name is not None)))
    connection.rollback()
    if revisions and revisions[0] < oldest:
        raise ConfigurationError(
            f"the database stays as it is: tokengroves of revision {revisions[0]} are connected to it, and after the "
            f"upgrade it takes servers from {oldest} on; replace or stop the older ones first"
        )


def _note_compatibility(
    ctx: MigrationContext, step: MigrationInfo, heads: Collection[str], run_args: Mapping[str, Any]
) -> None:
    """Leave in the database which servers run on it at the revision that it has now."""
    connection, script = ctx.connection, ctx.script
    assert connection is not None and script is not None
    if inspect(connection).has_table(compatibility.name):
        connection.execute(delete(compatibility))
        for name in heads:
            connection.execute(insert(compatibility).values(oldest_server=_oldest_server(script, name)))


def _oldest_server(script: ScriptDirectory, name: str) -> str:
    revision = script.get_revision(name)
    oldest: str = revision.module.oldest_server
    return oldest


run(context.config.attributes["connection"])
