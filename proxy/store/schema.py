"""Determines which databases this code runs on: its own revision, and newer revisions that accept its servers.

Older databases are migrated. Each migration declares the oldest server revision that still runs on the database after
it, and writes it to the table `compatibility`. So servers of two releases run side by side while replicas are replaced.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import NamedTuple

from sqlalchemy import URL, Connection, Engine, inspect, select, text
from sqlalchemy.exc import DatabaseError, DBAPIError

from proxy.progress import doing, step
from proxy.store import database, migrations
from proxy.store.faults import reason_of
from proxy.store.sql.tables import compatibility
from tokengrove.errors import ConfigurationError

logger = logging.getLogger(__name__)

# A migration that waits for a table lock blocks every turn behind it. So it waits briefly (see `migrations/env.py`)
# and tries again after a pause, for as long as a long read may take.
_PAUSE_S = 1.0
_PATIENCE_S = 120.0
_LOCK_NOT_AVAILABLE = "55P03"


class State(NamedTuple):
    """The revision of a database (None without tables), and the oldest server revision that it accepts.

    Before revision 0010, a database accepts only servers of its own revision, and `oldest_server` is None.
    """

    revision: str | None
    oldest_server: str | None

    @property
    def newer(self) -> bool:
        """Whether a newer tokengrove has migrated the database."""
        return self.revision is not None and self.revision > migrations.head()

    @property
    def served(self) -> bool:
        """Whether this tokengrove runs on the database without a migration."""
        if self.newer:
            return self.oldest_server is not None and self.oldest_server <= migrations.head()
        return self.revision == migrations.head()

    def check(self, name: str) -> None:
        """Raise ConfigurationError with the way out unless this tokengrove runs on the database called `name`."""
        if self.served:
            return
        if not self.newer:
            raise ConfigurationError(
                f"the database {name} is at revision {self.revision or 'none'} and needs {migrations.head()}; "
                "run: tokengrove db upgrade, or serve with --migrate"
            )
        oldest = f", and the database takes servers from {self.oldest_server} on" if self.oldest_server else ""
        raise ConfigurationError(
            f"the database {name} was made by a newer tokengrove (revision {self.revision}); upgrade tokengrove: this "
            f"one has revision {migrations.head()}{oldest}"
        )


def current(database_url: str) -> State:
    """The state of a database. Raises ConfigurationError."""
    url = database.parse_url(database_url)
    if database.is_sqlite(url) and not Path(database.label(url)).exists():
        return State(None, None)
    engine = database.writer_engine(url)
    try:
        return _state(engine)
    finally:
        engine.dispose()


def check(database_url: str, *, migrate: bool | None) -> None:
    """Raise ConfigurationError if `Store.open` would refuse the database. Changes nothing, and creates no database."""
    url = database.parse_url(database_url)
    if database.is_sqlite(url):
        database.check_file(url)
        if not Path(database.label(url)).exists():
            return
        database.FileLock(url).release()
    engine = database.reader_engine(url, 1)
    try:
        state = _state(engine)
        if state.revision is None:
            with engine.connect() as connection:
                _refuse_foreign_tables(connection)
    finally:
        engine.dispose()
    if state.newer or not (database.is_sqlite(url) if migrate is None else migrate):
        state.check(database.label(url))


def upgrade(database_url: str) -> str:
    """Upgrade a database to our revision and return its revision, which may be newer if it accepts our servers.

    Raises ConfigurationError, for example if a server uses the SQLite file.
    """
    url = database.parse_url(database_url)
    lock = lock_file(url) if database.is_sqlite(url) else None
    try:
        engine = database.writer_engine(url)
        try:
            return prepare(engine, migrate=True)
        finally:
            engine.dispose()
    finally:
        if lock is not None:
            lock.release()


def lock_file(url: URL) -> database.FileLock:
    """Lock a SQLite file. Raises ConfigurationError if it cannot be written or is locked."""
    database.check_file(url)
    return database.FileLock(url)


def prepare(engine: Engine, *, migrate: bool) -> str:
    """Upgrade an older database to our revision if `migrate` is set. Return the revision that it has then.

    Raises ConfigurationError if this tokengrove does not run on it.
    """
    state, name = _state(engine), database.label(engine.url)
    if migrate and not state.newer and not state.served:
        old, new = state.revision, migrations.head()
        with doing(f"upgrading the database from revision {old} to {new}" if old else "creating the tables"):
            _migrate(engine)
        return migrations.head()
    state.check(name)
    if state.newer:
        logger.warning(
            "the database %s is at revision %s, newer than ours (%s), and takes servers from %s on: this one runs",
            *(name, state.revision, migrations.head(), state.oldest_server),
        )
    return str(state.revision)


def _state(engine: Engine) -> State:
    try:
        with engine.connect() as connection:
            tables = inspect(connection)
            if not tables.has_table("alembic_version"):
                return State(None, None)
            revision = connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
            says = tables.has_table(compatibility.name)
            return State(revision, connection.execute(select(compatibility)).scalar() if says else None)
    except DatabaseError as error:
        reason = " ".join(str(error.orig).split())
        raise ConfigurationError(f"the database {database.label(engine.url)} cannot be opened: {reason}") from None


def _migrate(engine: Engine) -> None:
    until = time.monotonic() + _PATIENCE_S
    while True:
        try:
            return _try_to_migrate(engine)
        except DBAPIError as error:
            holder = _oldest_transaction(engine) if getattr(error.orig, "sqlstate", "") == _LOCK_NOT_AVAILABLE else ""
            if not holder or time.monotonic() > until:
                raise ConfigurationError(
                    f"the database {database.label(engine.url)} cannot be upgraded and stays as it is: "
                    f"{reason_of(error)}{holder and f'; {holder}: end it, or try again later'}"
                ) from None
            step(f"the migration waits for a lock: {holder}")
        time.sleep(_PAUSE_S)


def _try_to_migrate(engine: Engine) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    # Alembic takes a percent sign in a path for the start of a variable.
    config.set_main_option("script_location", str(migrations.folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with engine.connect() as connection:
        _refuse_foreign_tables(connection)
        connection.rollback()
        config.attributes["connection"] = connection
        command.upgrade(config, "head")


def _oldest_transaction(engine: Engine) -> str:
    """The oldest transaction of another connection to PostgreSQL, which most likely holds the lock."""
    query = text(
        "SELECT pid, coalesce(nullif(application_name, ''), 'an unnamed program'), xact_start FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND xact_start IS NOT NULL "
        "ORDER BY xact_start LIMIT 1"
    )
    with engine.connect() as connection:
        found = connection.execute(query).first()
    if found is None:
        return "its transaction has ended since"
    pid, program, began = found
    return f"the oldest transaction is that of {program}, process {pid}, since {began:%Y-%m-%d %H:%M:%S %Z}"


def _refuse_foreign_tables(connection: Connection) -> None:
    tables = set(inspect(connection).get_table_names())
    if "sessions" in tables and "alembic_version" not in tables:
        raise ConfigurationError(
            f"the database {database.label(connection.engine.url)} has a table 'sessions' that is not tokengrove's; "
            "give another database in --database-url"
        )
