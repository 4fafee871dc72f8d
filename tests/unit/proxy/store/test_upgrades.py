"""A database is migrated while servers of the release before use it, unless they could not go on."""

from __future__ import annotations

import importlib.util
import io
import logging
import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from proxy.store import database, migrations, schema
from proxy.store.store import Store
from proxy.types import SessionRecord
from tests.databases import execute, meanwhile
from tests.interactions import interaction
from tokengrove.errors import ConfigurationError

# The migrations of a next release: one column, a table, and an index of a table that exists already.
EXPANSION = """
    op.add_column("interactions", sa.Column("mood", sa.Text(), nullable=False, server_default="calm"))
    op.create_table("moods", sa.Column("name", sa.Text(), primary_key=True))
    with op.get_context().autocommit_block():
        op.drop_index("ix_interactions_mood", if_exists=True, postgresql_concurrently=True)
        op.create_index("ix_interactions_mood", "interactions", ["mood"], postgresql_concurrently=True)
"""
CONTRACTION = """
    op.drop_column("interactions", "stop_string")
"""
NEXT = f"{int(migrations.head()) + 1:04}"


class NextRelease:
    """Migrations of the next release in a folder of their own. While `installed`, this code is of that release."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch, self._own = folder / "migrations", patch, migrations.folder
        shutil.copytree(self._own(), self._folder, ignore=shutil.ignore_patterns("__pycache__"))

    def install(self, upgrade: str, oldest_server: str) -> None:
        text = (
            f"import sqlalchemy as sa\nfrom alembic import op\nrevision = '{NEXT}'\ndown_revision = '{self.before}'\n"
        )
        text += f"oldest_server = '{oldest_server}'\ndef upgrade():\n{upgrade}\ndef downgrade():\n    raise\n"
        (self._folder / "versions" / f"{NEXT}_next.py").write_text(text)
        self._patch.setattr(migrations, "folder", lambda: self._folder)

    def uninstall(self) -> None:
        self._patch.setattr(migrations, "folder", self._own)

    @property
    def before(self) -> str:
        return f"{int(NEXT) - 1:04}"


@pytest.fixture
def next_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NextRelease:
    monkeypatch.setattr(schema, "_PAUSE_S", 0.01)
    return NextRelease(tmp_path, monkeypatch)


async def test_a_server_runs_on_a_newer_database_that_takes_it_and_says_so(
    database_url: str, next_release: NextRelease, caplog: pytest.LogCaptureFixture
) -> None:
    next_release.install(EXPANSION, "0009")
    schema.upgrade(database_url)
    next_release.uninstall()
    for migrate in (None, False, True):
        store = Store.open(database_url, migrate=migrate)
        if migrate is None:
            await store.starts.create_session(SessionRecord("s"))
        await store.turns.append(interaction(f"i{migrate}"))
        await store.close()
    assert (
        f"is at revision {NEXT}, newer than ours ({migrations.head()}), and takes servers from 0009 on" in caplog.text
    )
    assert execute(database_url, "SELECT DISTINCT mood FROM interactions") == [("calm",)]
    assert schema.upgrade(database_url) == NEXT


def test_a_server_that_a_newer_database_does_not_take_is_refused(database_url: str, next_release: NextRelease) -> None:
    next_release.install(CONTRACTION, NEXT)
    schema.upgrade(database_url)
    next_release.uninstall()
    with pytest.raises(ConfigurationError, match=f"upgrade tokengrove: .* takes servers from {NEXT} on"):
        Store.open(database_url)


@pytest.fixture
def waits(caplog: pytest.LogCaptureFixture) -> Iterator[threading.Event]:
    """Set once a migration has said that it waits for a lock."""
    heard = threading.Event()
    handler = logging.Handler()
    handler.emit = lambda record: heard.set() if "waits for a lock" in record.getMessage() else None  # type: ignore[method-assign]
    log = logging.getLogger("proxy.start")
    log.addHandler(handler)
    with caplog.at_level(logging.INFO, "proxy.start"):
        yield heard
    log.removeHandler(handler)


def test_nothing_waits_behind_a_migration_that_waits_for_a_long_transaction(
    postgres_url: str, next_release: NextRelease, waits: threading.Event, caplog: pytest.LogCaptureFixture
) -> None:
    next_release.install(EXPANSION, "0009")
    migration = threading.Thread(target=schema.upgrade, args=(postgres_url,))
    with meanwhile(postgres_url, "SELECT count(*) FROM interactions"):
        migration.start()
        waits.wait()
        assert execute(postgres_url, "SELECT count(*) FROM interactions") == [(0,)]
        assert migration.is_alive()
    migration.join()
    assert "the oldest transaction is that of an unnamed program, process " in caplog.text
    assert schema.current(postgres_url) == (NEXT, "0009")
    assert execute(postgres_url, "SELECT indisvalid FROM pg_index WHERE indexrelid = 'ix_interactions_mood'::regclass")


def test_a_migration_gives_up_on_a_transaction_that_does_not_end(
    postgres_url: str, next_release: NextRelease, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_release.install(EXPANSION, "0009")
    monkeypatch.setattr(schema, "_PATIENCE_S", 0)
    refused = pytest.raises(ConfigurationError, match=r"stays as it is: .*lock timeout.* process \d+, since .*: end it")
    with meanwhile(postgres_url, "SELECT count(*) FROM interactions"), refused:
        schema.upgrade(postgres_url)
    assert schema.current(postgres_url).revision == next_release.before


def test_what_older_servers_cannot_run_on_waits_until_none_is_connected(
    postgres_url: str, next_release: NextRelease
) -> None:
    older = database.writer_engine(database.parse_url(postgres_url))
    next_release.install(CONTRACTION, NEXT)
    with older.connect(), pytest.raises(ConfigurationError) as caught:
        schema.upgrade(postgres_url)
    before = next_release.before
    assert (
        f"tokengroves of revision {before} are connected to it, and after the upgrade it takes servers from {NEXT} on"
        in (str(caught.value))
    )
    assert schema.current(postgres_url).revision == before
    older.dispose()
    other = create_engine(database.parse_url(postgres_url), poolclass=NullPool)  # no server of ours
    with other.connect() as connection:
        connection.exec_driver_sql("SET application_name = 'psql'")
        assert schema.upgrade(postgres_url) == NEXT


def modules() -> list[ModuleType]:
    """The migrations in order."""
    found = []
    for path in sorted((migrations.folder() / "versions").glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"migration_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        found.append(importlib.util.module_from_spec(spec))
        spec.loader.exec_module(found[-1])
    return found


def expansions() -> list[ModuleType]:
    """The migrations after which the database takes all servers that it took before."""
    both = zip(modules(), modules()[1:], strict=False)
    return [module for before, module in both if module.oldest_server == before.oldest_server]


def statements(module: ModuleType) -> list[str]:
    """What a migration runs on PostgreSQL."""
    out = io.StringIO()
    context = MigrationContext.configure(dialect_name="postgresql", opts={"as_sql": True, "output_buffer": out})
    with Operations.context(context):
        module.upgrade()
    return [" ".join(statement.split()) for statement in out.getvalue().split(";") if statement.strip()]


def refused(all_statements: list[str]) -> list[str]:
    """Those of the statements of a migration that servers of the release before, and their turns, do not go on with."""
    new = {match[1] for each in all_statements if (match := re.match(r"CREATE TABLE (\w+)", each))}
    return [each for each in all_statements if not _is_additive(each, new)]


def _is_additive(statement: str, new_tables: set[str]) -> bool:
    if re.match(r"BEGIN$|COMMIT$|COMMENT ON |DROP INDEX CONCURRENTLY IF EXISTS ", statement):
        return True
    if re.match(r"CREATE TABLE ", statement):
        # Older servers delete the rows of other tables that it would refer to.
        return set(re.findall(r"REFERENCES (\w+)", statement)) <= new_tables
    if match := re.match(r"CREATE (?:UNIQUE )?INDEX (\w+ ON|CONCURRENTLY \w+ ON) (\w+)", statement):
        return match[2] in new_tables or (match[1].startswith("CONCURRENTLY") and "UNIQUE" not in statement)
    if match := re.match(r"ALTER TABLE (\w+) ADD COLUMN (.*)", statement):
        # Constants as defaults: any other writes all rows of the table anew, under its lock.
        constant = re.search(r" DEFAULT ('[^']*'|-?[\d.]+|true|false)( |$)", match[2])
        bound = re.search(r"\b(REFERENCES|UNIQUE|CHECK|PRIMARY)\b", match[2])
        return (
            not bound
            and ("NOT NULL" not in match[2] or constant is not None)
            and ("DEFAULT" in match[2]) == bool(constant)
        )
    if match := re.match(r"INSERT INTO (\w+)", statement):
        return match[1] in new_tables
    return False


@pytest.mark.parametrize("module", expansions(), ids=lambda module: str(module.revision))
def test_a_migration_that_keeps_older_servers_running_only_adds(module: ModuleType) -> None:
    assert refused(statements(module)) == []


def test_there_are_expansions_and_what_a_database_takes_never_grows_backwards() -> None:
    assert "0010" in [module.revision for module in expansions()]
    oldest = [module.oldest_server for module in modules()]
    assert oldest == sorted(oldest)


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE interactions DROP COLUMN reward",
        "ALTER TABLE interactions ADD COLUMN mood TEXT NOT NULL",
        "ALTER TABLE interactions ADD COLUMN made FLOAT DEFAULT random()",
        "ALTER TABLE interactions ADD COLUMN other TEXT REFERENCES sessions (session_id)",
        "ALTER TABLE interactions ALTER COLUMN model DROP NOT NULL",
        "ALTER TABLE interactions RENAME COLUMN model TO name",
        "CREATE INDEX ix ON interactions (model)",
        "CREATE UNIQUE INDEX CONCURRENTLY ix ON interactions (model)",
        "CREATE TABLE moods (id TEXT REFERENCES interactions (id))",
        "DROP INDEX CONCURRENTLY ix",
        "UPDATE interactions SET mood = 'calm'",
        "INSERT INTO capacity VALUES ('a', 1)",
        "DROP TABLE returns",
    ],
)
def test_statements_that_older_servers_or_their_turns_do_not_stand_are_refused(statement: str) -> None:
    assert refused([statement]) == [statement]


@pytest.mark.parametrize(
    "statement",
    [
        "ALTER TABLE interactions ADD COLUMN mood TEXT",
        "ALTER TABLE interactions ADD COLUMN mood TEXT DEFAULT 'calm' NOT NULL",
        "CREATE INDEX CONCURRENTLY ix ON interactions (model)",
        "CREATE TABLE moods (id TEXT NOT NULL)",
        "CREATE TABLE moods (id TEXT REFERENCES moods (id))",
    ],
)
def test_statements_that_only_add_are_taken(statement: str) -> None:
    assert refused([statement]) == []
