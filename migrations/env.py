"""Runs all migrations in one transaction, on the connection that `proxy.store.schema` passes.

After a crash the database is at the old revision or at the new one, never between.
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection, text

from proxy.store.sql.tables import metadata

# An arbitrary number, the same in every tokengrove: replicas that start together migrate one after another.
ADVISORY_LOCK = 7_046_029


def run(connection: Connection) -> None:
    """Take the advisory lock (PostgreSQL), then migrate."""
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADVISORY_LOCK})
    context.configure(connection=connection, target_metadata=metadata, transactional_ddl=True)
    context.run_migrations()


run(context.config.attributes["connection"])
