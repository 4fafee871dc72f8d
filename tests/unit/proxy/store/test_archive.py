"""An archived session is in one file and in no table, comes back bit by bit, and outlasts a crash at any point."""

from __future__ import annotations

import asyncio
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import duckdb
import fsspec
import orjson
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from proxy.store.archive import archive as module
from proxy.store.archive import files
from proxy.store.archive.access import archive_of
from proxy.store.archive.archive import Archive
from proxy.store.archive.archiving import archive_old, prune_archived
from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.inspection import inspecting
from proxy.store.pruning import chosen
from tests.archives import SECRET, dumped, grow, quiet, there
from tests.databases import contents, execute
from tests.support import says, serving, user
from tokengrove import commands
from tokengrove.errors import ConfigurationError


def archive(url: str, to: object) -> Any:
    return archive_old(url, 0.0, str(to), dry_run=False)


def parquet(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.parquet"))


async def test_a_restored_database_is_that_from_before_the_archive(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    before, numbers = dumped(database_url, tmp_path), execute(database_url, "SELECT number, session_id FROM sessions")
    counted = execute(database_url, "SELECT * FROM capacity WHERE name = 'pruned' AND available > 0")
    found = archive(database_url, tmp_path / "archive")
    assert (found.sessions, found.turns, found.kept, found.broken) == (3, 4, 1, {})
    assert there(database_url) == there(database_url, "interactions") == {"unseen"}
    assert there(database_url, "archived_sessions") == {"s", "second", "empty"}
    assert SECRET.encode() not in contents(database_url)
    [file] = parquet(tmp_path / "archive")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with archive_of(database_url) as opened:
        assert opened.restore(None) == 3
    assert dumped(database_url, tmp_path) == before
    assert sorted(execute(database_url, "SELECT number, session_id FROM sessions")) == sorted(numbers)
    assert execute(database_url, "SELECT * FROM capacity WHERE name = 'pruned' AND available > 0") == counted
    assert parquet(tmp_path / "archive") == execute(database_url, "SELECT * FROM archive_files") == []


async def test_one_session_comes_back_and_the_others_stay_in_a_file_without_it(
    tmp_path: Path, database_url: str
) -> None:
    await grow(tmp_path, database_url)
    before = dumped(database_url, tmp_path)
    archive(database_url, tmp_path / "archive")
    [old] = parquet(tmp_path / "archive")
    with archive_of(database_url) as opened:
        opened.restore(["second"])
        assert there(database_url) == {"second", "unseen"}
        [new] = parquet(tmp_path / "archive")
        assert new != old
        assert set(duckdb.sql(f"SELECT DISTINCT session_id FROM '{new}'").fetchall()) == {("s",), ("empty",)}
        opened.restore(["s", "empty"])
    assert dumped(database_url, tmp_path) == before


async def test_a_deleted_session_is_in_no_file_any_more(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    archive(database_url, tmp_path / "archive")
    with archive_of(database_url) as opened:
        opened.delete(["second"], refusing_keys=True)
    assert there(database_url, "archived_sessions") == {"s", "empty"}
    [file] = parquet(tmp_path / "archive")
    assert SECRET not in str(duckdb.sql(f"SELECT * FROM '{file}'").fetchall())
    with archive_of(database_url) as opened:
        opened.delete(["s", "empty"], refusing_keys=True)
    assert parquet(tmp_path / "archive") == []


async def test_pruning_deletes_archived_sessions_of_that_age(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    archive(database_url, tmp_path / "archive")
    execute(database_url, "UPDATE archived_sessions SET ended_at = 1e12 WHERE session_id = 's'")
    assert prune_archived(database_url, 0.0, dry_run=True) == 2
    assert len(there(database_url, "archived_sessions")) == 3
    ran = CliRunner().invoke(commands.app, ["db", "prune", "--older-than", "0s", "--database-url", database_url])
    assert "deleted 2 archived sessions from their files" in ran.output
    [file] = parquet(tmp_path / "archive")
    assert duckdb.sql(f"SELECT DISTINCT session_id FROM '{file}'").fetchall() == [("s",)]


async def test_a_row_of_a_file_is_a_turn_with_its_tokens(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    stored = execute(url, "SELECT id, parent_id, prompt_suffix, output_ids FROM interactions WHERE session_id = 's'")
    archive(url, tmp_path / "archive")
    query = f"SELECT * FROM '{tmp_path}/archive/*.parquet' WHERE interaction_id IS NOT NULL ORDER BY session_id, seq"
    rows = duckdb.sql(query).fetchall()
    names = [each[0] for each in duckdb.sql(query).description]
    turns = [dict(zip(names, row, strict=True)) for row in rows if row[names.index("session_id")] == "s"]
    assert [turn["turn"] for turn in turns] == [0, 1, 2]
    for turn, (name, parent, suffix, output) in zip(turns, stored, strict=True):
        assert (turn["interaction_id"], turn["parent_id"]) == (name, parent)
        assert b"".join(each.to_bytes(4, "little") for each in turn["prompt_ids"]) == suffix
        assert b"".join(each.to_bytes(4, "little") for each in turn["output_ids"]) == output
        assert len(turn["logprobs"]) == len(turn["versions"]) == len(turn["output_ids"])
    assert (turns[-1]["reward"], turns[-1]["session_status"], turns[-1]["outcome"]) == (1.0, "ended", "Finished")
    assert orjson.loads(turns[0]["messages"])[0]["content"] == "a"


class Crash(BaseException):
    """The end of the process: nothing of ours catches it."""


@contextmanager
def crashing(at: int, patch: pytest.MonkeyPatch) -> Iterator[Callable[[], bool]]:
    """Crash at the `at`-th step that changes a file or the database, before or after it. Yields whether it did."""
    steps = 0

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps == at:
            raise Crash

    def around(work: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            step()
            found = work(*arguments)
            step()
            return found

        return wrapped

    @contextmanager
    def writing(url: str) -> Iterator[Any]:
        step()
        with written(url) as file:
            yield file
            step()  # a file of which only a part is on the disk
        step()

    written = files.writing
    with patch.context() as patched:
        patched.setattr(files, "writing", writing)
        patched.setattr(files, "remove", around(files.remove))
        made = Archive.__init__

        def init(self: Archive, access: Any, *more: Any) -> None:
            access.change = around(access.change)
            made(self, access, *more)

        patched.setattr(Archive, "__init__", init)
        yield lambda: steps >= at


async def every_crash(
    tmp_path: Path, patch: pytest.MonkeyPatch, prepare: Callable[[str, Path], Any], work: Callable[[str, Path], Any]
) -> int:
    """Do `work` with a crash at each step in turn, and again without; the result is that of no crash. Returns steps."""
    at, crashed = 0, True
    results = []
    template = tmp_path / "template.db"
    await grow(tmp_path, f"sqlite:///{template}")
    while crashed:
        at += 1
        folder = tmp_path / str(at)
        folder.mkdir()
        (folder / "test.db").write_bytes(template.read_bytes())
        url = f"sqlite:///{folder / 'test.db'}"
        before = dumped(url, folder)
        prepare(url, folder)
        with crashing(at, patch) as has:
            with suppress(Crash):
                work(url, folder)
            crashed = has()
        everything = {entry["session"]["session_id"] for entry in before}
        assert there(url) | there(url, "archived_sessions") == everything
        assert not there(url) & there(url, "archived_sessions")
        work(url, folder)
        named = {
            row
            for path in parquet(folder / "archive")
            for row in pyarrow.parquet.read_table(path)["session_id"].to_pylist()
        }
        assert named == there(url, "archived_sessions")
        assert not list((folder / "archive").glob("*.part"))
        with inspecting(url) as inspection:
            assert module.faults(inspection.read_now) == []
        assert set(execute(url, "SELECT state FROM archive_files")) <= {("settled",)}
        assert len(parquet(folder / "archive")) == len(execute(url, "SELECT file FROM archive_files"))
        results.append((there(url), there(url, "archived_sessions")))
        with archive_of(url) as opened:
            opened.restore(None)
        assert dumped(url, folder) == before
    assert all(each == results[-1] for each in results)
    return at


async def test_a_crash_while_sessions_are_archived_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = await every_crash(
        tmp_path, monkeypatch, lambda url, folder: None, lambda url, folder: archive(url, folder / "archive")
    )
    assert steps > 10


async def test_a_crash_while_a_session_is_restored_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restore(url: str, folder: Path) -> None:
        with archive_of(url) as opened:
            opened.restore(sorted({"second"} & there(url, "archived_sessions")))

    steps = await every_crash(tmp_path, monkeypatch, lambda url, folder: archive(url, folder / "archive"), restore)
    assert steps > 10


async def test_a_session_that_changes_while_its_file_is_written_stays(
    tmp_path: Path, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await grow(tmp_path, postgres_url)
    verify = module._verify

    def changed(*arguments: Any) -> None:
        verify(*arguments)
        execute(postgres_url, "UPDATE returns SET value = 7.0 WHERE discount = 1.0")

    monkeypatch.setattr(module, "_verify", changed)
    assert archive(postgres_url, tmp_path / "archive").sessions == 1
    assert there(postgres_url) == {"s", "second", "unseen"}
    [file] = parquet(tmp_path / "archive")
    assert duckdb.sql(f"SELECT session_id, interaction_id FROM '{file}'").fetchall() == [("empty", None)]


async def test_sessions_are_archived_next_to_a_server_and_one_archive_at_a_time(
    tmp_path: Path, postgres_url: str
) -> None:
    await grow(tmp_path, postgres_url)
    async with serving(tmp_path, says("more"), database_url=postgres_url) as server:
        await asyncio.to_thread(archive, postgres_url, tmp_path / "archive")
        await server.chat([user("more")], session="other")
    assert there(postgres_url) == {"unseen", "other"}


async def test_a_sqlite_file_that_is_served_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    async with serving(tmp_path, says(), database_url=url):
        with pytest.raises(ConfigurationError, match="in use by another server"):
            archive(url, tmp_path / "archive")


async def test_a_full_file_is_followed_by_another(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    folder = files.folder_url(str(tmp_path / "archive"))
    with archive_of(url) as opened:
        small = Archive(opened.access, file_bytes=1)
        assert small.add(folder, ["s", "second", "empty"], chosen(time.time()).pruned).sessions == 3
        assert len(parquet(tmp_path / "archive")) == 3
        small.delete(["second"], refusing_keys=False)
        assert len(parquet(tmp_path / "archive")) == 2


async def test_an_archive_is_anywhere_that_fsspec_reaches(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    before, fs = dumped(url, tmp_path), fsspec.filesystem("memory")
    archive(url, "memory://bucket/archive")
    assert len(fs.find("/bucket/archive")) == 1
    with archive_of(url) as opened:
        opened.delete(["second"], refusing_keys=False)
        assert len(fs.find("/bucket/archive")) == 1
        opened.restore(None)
    assert not fs.find("/bucket/archive")
    assert dumped(url, tmp_path) == [entry for entry in before if entry["session"]["session_id"] != "second"]


async def test_a_folder_that_cannot_be_used_keeps_no_other_from_being_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    (tmp_path / "typo").touch()
    with pytest.raises(ConfigurationError, match=r"typo/archive/.* cannot be written: Not a directory"):
        archive(url, tmp_path / "typo" / "archive")
    assert archive(url, tmp_path / "archive").sessions == 3
    assert "a file without archived sessions is left" in caplog.text and "typo/archive/" in caplog.text
    (tmp_path / "typo").unlink()
    with archive_of(url) as opened:
        opened.restore(None)
    assert execute(url, "SELECT * FROM archive_files") == []


async def test_a_damaged_file_is_named_and_nothing_is_deleted(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    archive(url, tmp_path / "archive")
    [file] = parquet(tmp_path / "archive")
    data = bytearray(file.read_bytes())
    data[100] ^= 255
    file.write_bytes(data)
    with archive_of(url) as opened, pytest.raises(ConfigurationError, match=f"{file.name} is damaged"):
        opened.restore(["s"])
    assert there(url, "archived_sessions") == {"s", "second", "empty"}
    file.unlink()
    ran = CliRunner().invoke(commands.app, ["db", "check", "--database-url", url])
    assert ran.exit_code == 1
    assert (
        f"3 archived sessions: the archive file file://{file} cannot be read: No such file or directory" in ran.output
    )


@pytest.mark.parametrize(("version", "taken"), [("1.7", True), ("2.0", False), (None, False)])
async def test_a_newer_minor_version_of_the_format_is_read_and_another_major_one_is_refused(
    tmp_path: Path, version: str | None, taken: bool
) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    archive(url, tmp_path / "archive")
    [file] = parquet(tmp_path / "archive")
    table = pyarrow.parquet.read_table(file)
    table = table.append_column("mood", pyarrow.array(["calm"] * table.num_rows))
    told = {name: value for name, value in table.schema.metadata.items() if name != b"tokengrove_archive"}
    told |= {} if version is None else {b"tokengrove_archive": version.encode()}
    pyarrow.parquet.write_table(table.replace_schema_metadata(told), file)
    with archive_of(url) as opened:
        if taken:
            assert opened.restore(None) == 3
        else:
            with pytest.raises(ConfigurationError, match=r"reads 1\.x" if version else "is not an archive"):
                opened.restore(None)


async def test_a_session_whose_id_was_taken_since_is_not_restored(tmp_path: Path) -> None:
    """A server of an older release, which knows no archive, let an agent begin another session of the name."""
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    archive(url, tmp_path / "archive")
    execute(
        url,
        "INSERT INTO sessions (session_id, task_id, status, discount, credit, created_at, updated_at, next_seq) "
        "VALUES ('s', 's', 'active', 1.0, 'tree', 1.0, 1.0, 0)",
    )
    with inspecting(url) as inspection:
        assert module.faults(inspection.read_now) == ["session s is archived, and also in the database"]
    with archive_of(url) as opened, pytest.raises(ConfigurationError, match="a new session has its id"):
        opened.restore(["s"])
    assert "s" in there(url, "archived_sessions")


async def test_a_session_that_cannot_be_read_stays_and_is_named(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    execute(url, "UPDATE interactions SET output = x'ff' WHERE session_id = 's' AND seq = 1")
    flags = ["--older-than", "0s", "--to", str(tmp_path / "archive"), "--database-url", url]
    ran = CliRunner().invoke(commands.app, ["archive", *flags])
    assert (ran.exit_code, "session s stays, because it cannot be read" in ran.output) == (1, True)
    assert there(url) == {"s", "unseen"}


async def test_the_command_prints_what_it_archived_kept_and_restored(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)

    def run(*arguments: str) -> str:
        ran = CliRunner().invoke(commands.app, ["archive", *arguments, "--database-url", url])
        assert ran.exit_code == 0, ran.output
        return ran.output

    flags = ("--older-than", "0s", "--to", str(tmp_path / "archive"))
    assert "would archive 3 sessions, 4 turns" in run(*flags, "--dry-run")
    assert not (tmp_path / "archive").exists()
    told = run(*flags)
    assert f"archived 3 sessions, 4 turns to file://{tmp_path}/archive" in told
    assert "kept 1 sessions of that age that were never exported" in told
    [file] = parquet(tmp_path / "archive")
    assert f"s\t3\tfile://{file}" in CliRunner().invoke(commands.app, ["archive", "list", "--database-url", url]).output
    ran = CliRunner().invoke(commands.app, ["show", "s", "--database-url", url])
    assert f"session 's' is archived in file://{file}" in str(ran.exception)
    for wrong in (
        ["archive", "--database-url", url, "list"],
        ["archive", "--older-than", "0s"],
        ["archive", "restore"],
    ):
        ran = CliRunner().invoke(commands.app, [*wrong])
        assert isinstance(ran.exception, ConfigurationError), wrong
    ran = CliRunner().invoke(commands.app, ["archive", "restore", "s", "--database-url", url])
    assert "restored 1 sessions" in ran.output
    ran = CliRunner().invoke(commands.app, ["archive", "delete", "second", "--database-url", url])
    assert "deleted 1 sessions" in ran.output
    ran = CliRunner().invoke(commands.app, ["db", "check", "--database-url", url])
    assert (ran.exit_code, "1 archived sessions" in ran.output) == (0, True)


async def test_a_backup_names_archived_sessions_and_an_import_notes_them(tmp_path: Path) -> None:
    url, into = (f"sqlite:///{tmp_path / name}" for name in ("from.db", "into.db"))
    await grow(tmp_path, url)
    before = dumped(url, tmp_path)
    archive(url, tmp_path / "archive")
    path = tmp_path / "backup.jsonl"
    export_all(url, str(path), quiet)
    for conflict in (Conflict.REFUSE, Conflict.SKIP):
        import_all(into, path, conflict, quiet)
        for table in ("archived_sessions", "withdrawn_keys"):
            assert sorted(execute(into, f"SELECT * FROM {table}")) == sorted(execute(url, f"SELECT * FROM {table}"))
    with archive_of(into) as opened:
        opened.restore(None)
    assert dumped(into, tmp_path) == before


async def test_another_process_that_reads_the_file_meanwhile_takes_no_commit_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last process that closes a SQLite file deletes its log. One that lost its locks would not count."""
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    move_out, read = (
        Archive._move_out,
        "import sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT * FROM sessions')",
    )

    def moved(*arguments: Any) -> bool:
        found = move_out(*arguments)
        subprocess.run([sys.executable, "-c", read, str(tmp_path / "test.db")], check=True)
        return found

    monkeypatch.setattr(Archive, "_move_out", moved)
    assert archive(url, tmp_path / "archive").sessions == 3
    assert there(url, "archived_sessions") == {"s", "second", "empty"}
    assert there(url) == {"unseen"}
