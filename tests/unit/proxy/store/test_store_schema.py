"""A store opens a database that it can serve, or refuses it with one line that states the reason."""

from __future__ import annotations

import importlib.util
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext

from proxy.store import database, migrations, schema
from proxy.store.sql.codec import encode_json
from proxy.store.sql.tables import metadata
from proxy.store.store import Store
from tests.databases import execute
from tokengrove.errors import ConfigurationError


@pytest.fixture
def database_url(unmigrated_url: str) -> str:
    """The URL of a database without tables, SQLite and Postgres in turn."""
    return unmigrated_url


def refusal(url: str, **options: bool) -> str:
    """The line of the error that `Store.open` raises, and `schema.check` before anything is loaded."""
    with pytest.raises(ConfigurationError) as caught:
        Store.open(url, **options)
    with pytest.raises(ConfigurationError) as early:
        schema.check(url, migrate=options.get("migrate"))
    assert str(early.value) == str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_check_passes_what_can_be_served_and_changes_nothing(database_url: str, tmp_path: Path) -> None:
    before = schema.current(database_url).revision
    schema.check(database_url, migrate=True)
    assert schema.current(database_url).revision == before is None
    new = tmp_path / "new"
    new.mkdir()
    schema.check(f"sqlite:///{new}/base.db", migrate=None)
    assert list(new.iterdir()) == []
    schema.upgrade(database_url)
    schema.check(database_url, migrate=False)


def is_table_of_both(name: str | None, kind: str, _parents: object) -> bool:
    """Whether a table is of one kind on both databases: not the text index, with the tables that SQLite keeps it in."""
    return kind != "table" or not (name or "").startswith("turn_words")


def test_the_migrations_make_exactly_the_tables(database_url: str) -> None:
    schema.upgrade(database_url)
    engine = database.writer_engine(database.parse_url(database_url))
    with engine.connect() as connection:
        opts = {"compare_type": True, "compare_server_default": True, "include_name": is_table_of_both}
        context = MigrationContext.configure(connection, opts=opts)
        assert compare_metadata(context, metadata) == []
    engine.dispose()


def test_the_head_is_the_number_of_the_newest_file_and_each_file_names_itself() -> None:
    files = sorted((migrations.folder() / "versions").glob("*.py"))
    numbers = [path.name[:4] for path in files]
    assert numbers == [f"{n:04}" for n in range(1, len(files) + 1)]
    assert migrations.head() == numbers[-1]
    for path, number in zip(files, numbers, strict=True):
        spec = importlib.util.spec_from_file_location("migration", path)
        assert spec is not None and spec.loader is not None
        migration = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(migration)
        assert migration.revision == number
        assert migration.oldest_server <= number
        assert migration.down_revision == (f"{int(number) - 1:04}" if number != "0001" else None)


def test_current_is_none_before_and_head_after_the_upgrade(database_url: str) -> None:
    assert schema.current(database_url).revision is None
    assert schema.upgrade(database_url) == schema.upgrade(database_url) == migrations.head()
    assert schema.current(database_url).revision == migrations.head()


def test_asking_for_the_revision_makes_no_file(url: str, tmp_path: Path) -> None:
    schema.current(url)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.wide
def test_a_start_with_a_current_database_needs_no_alembic(database_url: str) -> None:
    schema.upgrade(database_url)
    script = (
        "import asyncio, sys; from proxy.store.store import Store\n"
        f"asyncio.run(Store.open({database_url!r}).close()); assert 'alembic' not in sys.modules"
    )
    root = str(Path(__file__).resolve().parents[4])
    subprocess.run([sys.executable, "-c", script], check=True, env={**os.environ, "PYTHONPATH": root})


def test_a_newer_database_is_refused_and_left_alone(database_url: str) -> None:
    schema.upgrade(database_url)
    execute(database_url, "UPDATE alembic_version SET version_num = '9999'")
    execute(database_url, "UPDATE compatibility SET oldest_server = '9998'")
    line = refusal(database_url, migrate=True)
    assert "was made by a newer tokengrove (revision 9999); upgrade tokengrove" in line
    assert f"this one has revision {migrations.head()}, and the database takes servers from 9998 on" in line
    assert schema.current(database_url).revision == "9999"


def test_the_migrations_go_down_and_up_again_and_keep_what_older_revisions_know(database_url: str) -> None:
    schema.upgrade(database_url)
    insert = "INSERT INTO sessions (session_id, task_id, status, discount, credit, created_at, updated_at, next_seq)"
    execute(database_url, f"{insert} VALUES ('s', 't', 'active', 1, 'tree', 0, 0, 0)")
    migrate(database_url, "0001")
    assert schema.current(database_url).revision == "0001"
    assert "tokengrove db upgrade" in refusal(database_url, migrate=False)
    schema.upgrade(database_url)
    assert execute(database_url, "SELECT session_id, revision FROM sessions") == [("s", 0)]
    migrate(database_url, "base")
    assert schema.current(database_url).revision is None
    assert schema.upgrade(database_url) == migrations.head()


def test_a_migration_that_a_full_disk_refuses_leaves_the_database_as_it_was(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema.upgrade(url)
    migrate(url, "0001")
    database.shrink(database.parse_url(url))
    [(pages,)] = execute(url, "PRAGMA page_count")
    with monkeypatch.context() as full:
        full.setattr(database, "_WRITER_PRAGMAS", (*database._WRITER_PRAGMAS, f"max_page_count={pages}"))
        with pytest.raises(ConfigurationError, match="database or disk is full"):
            Store.open(url)
    assert schema.current(url).revision == "0001"
    assert schema.upgrade(url) == migrations.head()


def test_replies_that_older_revisions_noted_stay_noted(database_url: str) -> None:
    schema.upgrade(database_url)
    migrate(database_url, "0003")
    insert = "INSERT INTO sessions (session_id, task_id, status, discount, credit, created_at, updated_at, next_seq)"
    execute(database_url, f"{insert} VALUES ('s', 't', 'active', 1, 'tree', 0, 0, 3)")
    columns = (
        "id, session_id, seq, status, replied_at, created_at, aligned, reason, api, model, request_hash, "
        "prefix_length, prompt_tokens, output_tokens, prompt_suffix, output_ids, logprobs, trainable, reasoning_tokens"
    )
    rest = "false, 'first', 'chat', 'm', 'h', 0, 0, 0, '', '', '', true, 0"
    for seq, (name, status, at) in enumerate(
        [("replied", "complete", "3"), ("cut", "complete", "NULL"), ("failed", "failed", "NULL")]
    ):
        execute(
            database_url,
            f"INSERT INTO interactions ({columns}) VALUES ('{name}', 's', {seq}, '{status}', {at}, 1, {rest})",
        )
    schema.upgrade(database_url)
    assert execute(database_url, "SELECT interaction_id, session_id FROM unreplied") == [("cut", "s")]
    migrate(database_url, "0003")
    assert execute(database_url, "SELECT id FROM interactions WHERE replied_at IS NOT NULL") == [("replied",)]


def test_validation_sessions_of_older_revisions_are_marked(database_url: str) -> None:
    schema.upgrade(database_url)
    migrate(database_url, "0005")
    columns = "session_id, metadata, task_id, status, discount, credit, created_at, updated_at, next_seq"
    described = {"a": {"validate": True, "text": "x" * 9000}, "b": {"validate": 1}, "c": {}, "d": {"validate": True}}
    for name, value in described.items():
        digits = (encode_json(value) or b"").hex()
        literal = "NULL" if not digits else f"X'{digits}'" if "sqlite" in database_url else f"'\\x{digits}'"
        rest = f"'{name}', {literal}, 't', 'active', 1, 'tree', 0, 0, 0"
        execute(database_url, f"INSERT INTO sessions ({columns}) VALUES ({rest})")
    schema.upgrade(database_url)
    marked = execute(database_url, "SELECT session_id FROM sessions WHERE validation ORDER BY session_id")
    assert marked == [("a",), ("d",)]


def migrate(url: str, revision: str) -> None:
    """Downgrade to a revision, as a developer would."""
    config = Config()
    config.set_main_option("script_location", str(migrations.folder()))
    config.set_main_option("path_separator", "os")
    engine = database.writer_engine(database.parse_url(url))
    with engine.connect() as connection:
        config.attributes["connection"] = connection
        command.downgrade(config, revision)
    engine.dispose()


def test_an_old_database_is_refused_without_migration(database_url: str) -> None:
    assert "tokengrove db upgrade" in refusal(database_url, migrate=False)


async def test_a_current_database_is_opened_without_migration(database_url: str) -> None:
    schema.upgrade(database_url)
    await Store.open(database_url, migrate=False).close()


async def test_a_second_server_is_refused_until_the_first_ends(url: str) -> None:
    store = Store.open(url)
    assert "is in use by another server" in refusal(url)
    with pytest.raises(ConfigurationError, match="is in use by another server"):
        schema.upgrade(url)
    await store.close()
    await Store.open(url).close()


async def test_another_name_of_the_same_file_is_the_same_database(url: str, tmp_path: Path) -> None:
    store = Store.open(url)
    (tmp_path / "link.db").symlink_to(tmp_path / "grove.db")
    assert "is in use by another server" in refusal(f"sqlite:///{tmp_path / 'link.db'}")
    await store.close()


async def test_a_refused_start_leaves_no_lock(url: str, tmp_path: Path) -> None:
    (tmp_path / "grove.db").write_text("no database")
    refusal(url)
    (tmp_path / "grove.db").unlink()
    await Store.open(url).close()


def test_a_file_that_is_no_database_is_refused(url: str, tmp_path: Path) -> None:
    (tmp_path / "grove.db").write_text("this is a text file, and a long one at that" * 100)
    assert "file is not a database" in refusal(url)


def test_a_foreign_database_is_refused_and_left_unchanged(url: str, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "grove.db")) as connection, connection:
        connection.execute("CREATE TABLE sessions (mine INTEGER)")
    assert "is not tokengrove's" in refusal(url)
    with closing(sqlite3.connect(tmp_path / "grove.db")) as connection:
        assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("sessions",)]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert f"{tmp_path / 'missing'}, does not exist" in refusal(f"sqlite:///{tmp_path / 'missing' / 'grove.db'}")


def test_a_folder_as_the_database_is_refused(tmp_path: Path) -> None:
    assert "is a folder" in refusal(f"sqlite:///{tmp_path}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_refused(url: str, tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    assert "permission denied" in refusal(url)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs an unwritable folder")
def test_an_unwritable_path_is_refused() -> None:
    assert "cannot be written" in refusal("sqlite:////proc/self/grove.db")


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///:memory:", "sqlite:///file:x?mode=memory&uri=true"])
def test_memory_is_refused(url: str) -> None:
    assert "in memory is not durable" in refusal(url)


@pytest.mark.parametrize("url", ["", "grove.db", "http//x", "sqlite:/grove.db", "postgresql://host:port/x"])
def test_an_invalid_database_url_is_refused(url: str) -> None:
    assert "--database-url" in refusal(url)


def test_another_kind_of_database_is_refused_without_its_password() -> None:
    line = refusal("mysql://me:secret@host/db")
    assert "neither SQLite nor PostgreSQL" in line and "secret" not in line


@pytest.mark.skipif(importlib.util.find_spec("psycopg") is not None, reason="psycopg is installed")
def test_postgres_without_its_driver_names_the_package_to_install() -> None:
    assert "tokengrove[postgres]" in refusal("postgresql://me:secret@host/db")


async def test_a_relative_path_stays_the_same_file_when_the_folder_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.open("sqlite:///a%20b.db")
    monkeypatch.chdir("/")
    await store.ping()
    await store.close()
    assert set(os.listdir(tmp_path)) == {"a b.db", "a b.db.lock"}


async def test_the_journal_is_write_ahead_and_every_commit_reaches_the_disk(url: str) -> None:
    store = Store.open(url)
    await store.close()
    engine = database.writer_engine(database.parse_url(url))
    with engine.connect() as connection:
        assert connection.exec_driver_sql("PRAGMA journal_mode").scalar() == "wal"
        assert connection.exec_driver_sql("PRAGMA synchronous").scalar() == 2
    engine.dispose()


def test_a_reader_cannot_write(url: str) -> None:
    schema.upgrade(url)
    engine = database.reader_engine(database.parse_url(url), 1)
    with engine.connect() as connection, pytest.raises(Exception, match="readonly"):
        connection.exec_driver_sql("DELETE FROM sessions")
    engine.dispose()


@pytest.mark.parametrize(
    "given",
    [
        "postgresql://u:s3cret@h/d",
        "postgresql://h/d?user=u&password=s3cret&sslpassword=s3cret",
        "postgres//u:s3cret@h/d",
        "mysql://u:s3cret@h/d",
        "nonsense?password=s3cret",
    ],
)
def test_no_message_has_the_password_of_a_database(given: str) -> None:
    try:
        shown = database.label(database.parse_url(given))
    except ConfigurationError as error:
        shown = str(error)
    assert "s3cret" not in shown and given[:8] in shown


@pytest.mark.parametrize("url", ["postgresql://u:pa:ss@h:no/d", "postgresql:/u:pa:ss@h/d", "x://u:pa:ss@h:no/d@e"])
def test_the_refusal_of_a_malformed_url_has_nothing_of_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        database.parse_url(url)
    assert "***" in str(caught.value) and "pa" not in str(caught.value).replace("--database-url", "")
