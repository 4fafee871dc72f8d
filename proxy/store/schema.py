"""The revision of a database must be exactly that of this code: older databases are migrated, newer ones refused.

Revisions are read from the file names of the migrations, so a start with a current database does not import alembic,
which takes longer than the rest of the start.
"""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import URL, Connection, Engine, inspect, text
from sqlalchemy.exc import DatabaseError, DBAPIError

from proxy.errors import ConfigurationError
from proxy.store import database
from proxy.store.faults import reason_of


def current(database_url: str) -> str | None:
    """The revision of the database; None if it has no tables yet. Raises ConfigurationError."""
    url = database.parse_url(database_url)
    if database.is_sqlite(url) and not Path(database.label(url)).exists():
        return None
    engine = database.writer_engine(url)
    try:
        return _revision(engine)
    finally:
        engine.dispose()


def upgrade(database_url: str) -> str:
    """Upgrade a database to the newest revision, and return that.

    Raises ConfigurationError, for example if a server uses the SQLite file.
    """
    url = database.parse_url(database_url)
    lock = lock_file(url) if database.is_sqlite(url) else None
    try:
        engine = database.writer_engine(url)
        try:
            prepare(engine, migrate=True)
        finally:
            engine.dispose()
    finally:
        if lock is not None:
            lock.release()
    return head()


def lock_file(url: URL) -> database.FileLock:
    """Lock a SQLite file. Raises ConfigurationError if it cannot be written or is locked."""
    database.check_file(url)
    return database.FileLock(url)


def head() -> str:
    """The newest revision that this code has a migration for."""
    return max(_known())


def prepare(engine: Engine, *, migrate: bool) -> None:
    """Bring the database to `head()`. Raises ConfigurationError if it is newer, or older without `migrate`."""
    found, name = _revision(engine), database.label(engine.url)
    if found == head():
        return
    if found is not None and found not in _known():
        raise ConfigurationError(
            f"the database {name} was made by a newer tokengrove (revision {found}); upgrade tokengrove"
        )
    if not migrate:
        raise ConfigurationError(
            f"the database {name} is at revision {found or 'none'} and needs {head()}; "
            "run: tokengrove db upgrade, or serve with --migrate"
        )
    _migrate(engine)


def migrations_folder() -> Path:
    """The folder of the migrations: in the installed package, or beside it in a checkout. Raises ConfigurationError."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise ConfigurationError("the migrations are missing from this installation; install tokengrove again")


def _known() -> set[str]:
    names = {path.name.partition("_")[0] for path in (migrations_folder() / "versions").glob("[0-9]*_*.py")}
    if not names:
        raise ConfigurationError("the migrations are missing from this installation; install tokengrove again")
    return names


def _revision(engine: Engine) -> str | None:
    try:
        with engine.connect() as connection:
            if not inspect(connection).has_table("alembic_version"):
                return None
            return connection.execute(text("SELECT version_num FROM alembic_version")).scalar()
    except DatabaseError as error:
        reason = " ".join(str(error.orig).split())
        raise ConfigurationError(f"the database {database.label(engine.url)} cannot be opened: {reason}") from None


def _migrate(engine: Engine) -> None:
    from alembic import command
    from alembic.config import Config

    config = Config()
    # Alembic takes a percent sign in a path for the start of a variable.
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    try:
        with engine.begin() as connection:
            _refuse_foreign_tables(connection)
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except DBAPIError as error:
        raise ConfigurationError(
            f"the database {database.label(engine.url)} cannot be upgraded and stays as it is: {reason_of(error)}"
        ) from None


def _refuse_foreign_tables(connection: Connection) -> None:
    tables = set(inspect(connection).get_table_names())
    if "sessions" in tables and "alembic_version" not in tables:
        raise ConfigurationError(
            f"the database {database.label(connection.engine.url)} has a table 'sessions' that is not tokengrove's; "
            "give another database in --database-url"
        )
