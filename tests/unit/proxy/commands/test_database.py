"""The commands of `tokengrove db`: their output and exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from proxy.store import migrations, schema
from proxy.store.store import Store
from proxy.types import Interaction, SessionRecord
from tests.databases import execute
from tests.interactions import interaction
from tokengrove import commands
from tokengrove.reasons import Reason


def test_the_revision_check_fails_for_a_database_that_this_version_cannot_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, newest = f"sqlite:///{tmp_path / 'test.db'}", migrations.head()
    check = ["db", "current", "--database-url", url]
    schema.upgrade(url)
    ran = CliRunner().invoke(commands.app, check)
    takes = "it takes servers from 0009 on\n"
    assert (ran.exit_code, ran.output) == (0, f"revision {newest}, this tokengrove needs {newest}; {takes}")
    monkeypatch.setattr(migrations, "head", lambda: "9999")
    ran = CliRunner().invoke(commands.app, check)
    assert (ran.exit_code, ran.output) == (1, f"revision {newest}, this tokengrove needs 9999; {takes}")


def test_a_check_counts_missing_checksums_and_fills_them(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    schema.upgrade(url)
    execute(
        url,
        "INSERT INTO sessions (session_id, task_id, status, discount, credit, created_at, updated_at, next_seq) "
        "VALUES ('old', '', 'active', 1.0, 'tree', 1.0, 1.0, 0)",
    )
    check = ["db", "check", "--database-url", url]
    counts = "1 sessions, 0 interactions, 0 sampled tokens, 0 unfinished calls, 0 findings\n"
    lack = "1 checksums are missing, of rows of older versions: add them with --fill\n"
    for flags, told in (([], lack), (["--fill"], "added 1 checksums\n"), ([], "")):
        ran = CliRunner().invoke(commands.app, [*check, *flags])
        assert (ran.exit_code, ran.stdout) == (0, counts + told)


def test_an_upgrade_tells_its_steps_on_stderr_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, newest = f"sqlite:///{tmp_path / 'test.db'}", migrations.head()
    command = ["db", "upgrade", "--database-url", url]
    done = CliRunner().invoke(commands.app, command)
    assert (done.exit_code, done.stdout) == (0, f"the database is at revision {newest}\n")
    assert done.stderr.splitlines()[0] == "creating the tables"
    with monkeypatch.context() as older:
        older.setattr(schema, "_migrate", lambda engine: None)
        older.setattr(migrations, "head", lambda: "9999")
        done = CliRunner().invoke(commands.app, command)
    assert done.stderr.splitlines()[0] == f"upgrading the database from revision {newest} to 9999"


async def test_sessions_whose_score_is_another_than_before_are_listed(tmp_path: Path) -> None:
    def asked(name: str, *rewards: float, together: bool = False) -> tuple[SessionRecord, list[Interaction]]:
        nodes = [interaction(f"{name}{at}", seq=at, reward=value) for at, value in enumerate(rewards)]
        for at, node in enumerate(nodes):
            node.session_id, node.state_hash, node.reason = name, "wall", Reason.RESAMPLED if at else Reason.FIRST
            node.created_at, node.completed_at = float(at), at + (100.0 if together else 0.5)
        return SessionRecord(name), nodes

    sessions = [asked("walls", 1.0, 0.5), asked("best", 1.0, 0.5, together=True), asked("once", 1.0)]
    url = f"sqlite:///{tmp_path / 'test.db'}"
    store = Store.open(url, migrate=True)
    for record, nodes in sessions:
        await store.starts.create_session(record)
        for node in nodes:
            await store.turns.append(node)
    await store.close()
    ran = CliRunner().invoke(commands.app, ["db", "scores", "--database-url", url])
    assert ran.exit_code == 0 and ran.output.splitlines()[:-1] == ["session walls: 0.75 -> 1.5"]
    assert ran.output.splitlines()[-1].startswith("1 sessions have another score")
