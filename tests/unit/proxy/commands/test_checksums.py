"""A stored checksum finds each changed byte of a column that never changes, in both databases and after an import."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from sqlite3 import connect
from typing import Any

import pytest
from sqlalchemy import Boolean, Column, Connection, Double, LargeBinary, Text, select, update

from proxy.commands.audit import Audit, audit
from proxy.commands.rescored import rescored
from proxy.store import database
from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.inspection import filling, inspecting
from proxy.store.sql import checksums
from proxy.store.sql.tables import interactions, sessions
from proxy.store.store import Store
from tests.databases import execute
from tests.support import assistant, says, serving, user
from tests.wide import WIDE
from tokengrove.errors import ConfigurationError
from tokengrove.reasons import Status

FIXED = sorted({*interactions.c.keys()} - checksums.CHANGED_OF_TURNS - {"id", "session_id"})
STARTED = sorted(checksums.OF_STARTS - {"session_id"})
OTHER = {*sessions.c.keys()} - checksums.OF_STARTS - checksums.OF_ENDS


async def grow(folder: Path, url: str) -> None:
    """Create the ended session s of two turns and a failed one, and the live session t of one turn."""
    async with serving(folder, says("one", "two", "three"), database_url=url) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "group_id": "g", "metadata": {"x": "y" * 5000}})
        reply = await server.answer([user("a")])
        await server.chat([user("a"), assistant(reply["content"]), user("b" * 5000)])
        await server.ok("/s/rl/end_session", {"reward": 1.0, "metrics": {"m": 0.1}})
        await server.chat([user("x")], session="t")


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A grown SQLite database, to be copied."""
    folder = tmp_path_factory.mktemp("grown")
    asyncio.run(grow(folder, f"sqlite:///{folder / 'grove.db'}"))
    return (folder / "grove.db").read_bytes()


def checked(url: str, **more: Any) -> Audit:
    with inspecting(url) as inspection:
        return audit(inspection, **more)


def told(url: str) -> list[str]:
    return [str(found) for found in checked(url).findings]


@contextmanager
def writing(url: str) -> Iterator[Connection]:
    engine = database.writer_engine(database.parse_url(url))
    try:
        with engine.begin() as connection:
            yield connection
    finally:
        engine.dispose()


def changed(column: Column[Any], value: Any) -> Any:
    """A value of the same type that differs by as little as can be."""
    if isinstance(column.type, LargeBinary):
        data = bytearray(value or b"j0")
        data[-1] ^= 1
        return bytes(data)
    if isinstance(column.type, Boolean):
        return not value
    if isinstance(column.type, Double):
        return math.nextafter(value or 0.0, math.inf)
    return (value or "") + " " if isinstance(column.type, Text) else (value or 0) + 1


def unnoticed(url: str, column: Column[Any], key: Column[Any], name: str) -> bool:
    """Whether no finding names a row after a change of its `column`, which is undone."""
    with writing(url) as connection:
        before = connection.execute(select(column).where(key == name)).scalar_one()
        connection.execute(update(column.table).where(key == name).values({column: changed(column, before)}))
    found = told(url)
    with writing(url) as connection:
        connection.execute(update(column.table).where(key == name).values({column: before}))
    return not any("checksum differs" in each and "session s" in each for each in found)


@WIDE
async def test_a_change_of_any_fixed_column_is_found(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    copied, dumped = f"sqlite:///{tmp_path / 'copied.db'}", tmp_path / "all.jsonl"
    export_all(database_url, str(dumped), lambda _: None)
    import_all(copied, dumped, Conflict.REFUSE, lambda _: None)
    for url in (database_url, copied):
        result = checked(url)
        assert (result.findings, result.unsummed) == ([], 0)
    [(name,)] = execute(database_url, "SELECT id FROM interactions WHERE session_id = 's' AND seq = 1")
    for url in (database_url, copied):
        turns = [each for each in FIXED if unnoticed(url, interactions.c[each], interactions.c.id, name)]
        starts = [each for each in STARTED if unnoticed(url, sessions.c[each], sessions.c.session_id, "s")]
        ends = [
            each
            for each in sorted(checksums.OF_ENDS - {"status"})
            if unnoticed(url, sessions.c[each], sessions.c.session_id, "s")
        ]
        assert (turns, starts, ends) == ([], [], [])
        assert told(url) == []


def test_every_column_of_sessions_is_fixed_or_known_to_change() -> None:
    assert {
        *("number", "api_key_hash", "control_key_hash", "path_key_hash", "keys_expire_at", "updated_at", "next_seq"),
        *("revision", "ended_order", "claimed_by", "claimed_until", "claimed_order", "acknowledged_at", "exported_at"),
        *("checksum", "end_checksum", "withdrawn_at", "feedback_key_hash"),
    } == OTHER


async def test_rewards_marks_keys_and_superseding_leave_the_checksums(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("one", "two"), database_url=database_url) as server:
        await server.ok("/rl/start_session", {"session_id": "s"})
        reply = await server.chat([user("a")])
        await server.ok("/s/rl/mark", {"interaction_id": reply["id"], "trainable": False})
        await server.ok("/s/rl/set_reward", {"reward": 1.0})
        await server.ok("/s/rl/rotate_keys", {})
        await server.ok("/s/rl/end_session", {"reward": 2.0, "outcome": "Finished"})
        await server.ok("/s/rl/set_reward", {"reward": 3.0})
        await server.ok("/trajectories/acknowledge", {"session_ids": ["s"]})
    execute(database_url, f"UPDATE interactions SET status = '{Status.COMPLETE}'")
    assert told(database_url) == []


async def test_a_blob_that_does_not_unpack_is_named_and_the_others_are_checked(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    await grow(tmp_path, url)
    execute(url, "UPDATE interactions SET new_messages = X'7A0000' WHERE session_id = 's' AND seq = 1")
    execute(url, "UPDATE sessions SET metadata = X'7A0000' WHERE session_id = 's'")
    execute(url, "UPDATE interactions SET logprobs = X'0000003F' WHERE session_id = 't'")
    found = told(url)
    [(name,)] = execute(url, "SELECT id FROM interactions WHERE session_id = 's' AND seq = 1")
    assert any(
        each.startswith(f"session s, turn 1, interaction {name}: cannot be decoded: column new_messages")
        for each in found
    )
    assert any(each.startswith("session s: cannot be decoded: column metadata: error: Error") for each in found)
    assert any(each.startswith("session t, turn 0") for each in found)


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE interactions SET model = CAST(X'FF41' AS TEXT)",
        "UPDATE interactions SET status = CAST(X'FF' AS TEXT)",
        "UPDATE interactions SET prefix_length = 'many'",
        "UPDATE interactions SET seq = 1.5 WHERE seq = 1",
        "UPDATE interactions SET created_at = 'once'",
        "UPDATE interactions SET output_ids = 7",
        "UPDATE sessions SET task_id = CAST(X'FF' AS TEXT)",
        "UPDATE sessions SET next_seq = 'x'",
        "UPDATE returns SET credit = 'none'",
        "UPDATE interactions SET id = X'FF41' WHERE seq = 1",
        "UPDATE interactions SET reward = 'much' WHERE seq = 1",
        "UPDATE sessions SET discount = X'FF' WHERE session_id = 's'",
        "UPDATE sessions SET session_id = X'FF41' WHERE session_id = 's'",
        f"UPDATE sessions SET next_seq = {2**62}",
    ],
)
def test_a_value_of_a_wrong_type_is_a_finding_and_not_the_end(tmp_path: Path, grown: bytes, change: str) -> None:
    (tmp_path / "grove.db").write_bytes(grown)
    url = f"sqlite:///{tmp_path / 'grove.db'}"
    with closing(connect(tmp_path / "grove.db")) as connection:
        connection.execute(change)
        connection.commit()
    result = checked(url)
    assert result.findings and result.sessions == 2
    assert "\n".join(map(str, result.findings)).encode()
    with inspecting(url) as inspection:
        assert list(rescored(inspection)) == []


async def test_rows_without_a_checksum_are_counted_and_filled_if_nothing_is_found(
    tmp_path: Path, database_url: str
) -> None:
    await grow(tmp_path, database_url)
    written = checksums_of(database_url)
    execute(database_url, "UPDATE interactions SET checksum = NULL")
    execute(database_url, "UPDATE sessions SET checksum = NULL, end_checksum = NULL")
    execute(database_url, "UPDATE returns SET value = 7.0")
    assert (checked(database_url).unsummed, checked(database_url).filled) == (6, 0)
    with filling(database_url) as fill:
        result = checked(database_url, fill=fill)
    assert (result.unsummed, result.filled) == (6, 2)  # s has findings
    execute(database_url, "DELETE FROM returns")
    execute(database_url, "UPDATE sessions SET status = 'ended' WHERE session_id = 's'")
    execute(database_url, "UPDATE interactions SET reward = NULL")
    assert checked(database_url).unsummed == 4
    assert {name: digest for name, digest in checksums_of(database_url).items() if digest} == {
        name: digest for name, digest in written.items() if name in checksums_of(database_url, "t")
    }


def checksums_of(url: str, session_id: str | None = None) -> dict[str, Any]:
    """The checksums of all sessions or one, and of their turns, by id."""
    of = "" if session_id is None else f" WHERE session_id = '{session_id}'"
    found = [*execute(url, f"SELECT id, checksum FROM interactions{of}")]
    found += execute(url, f"SELECT session_id, checksum FROM sessions{of}")
    return {name: None if digest is None else bytes(digest) for name, digest in found}


async def test_a_dump_without_checksums_is_imported_and_filled(tmp_path: Path) -> None:
    url, copied = f"sqlite:///{tmp_path / 'grove.db'}", f"sqlite:///{tmp_path / 'copied.db'}"
    await grow(tmp_path, url)
    written = checksums_of(url)
    execute(url, "UPDATE interactions SET checksum = NULL")
    execute(url, "UPDATE sessions SET checksum = NULL, end_checksum = NULL")
    export_all(url, str(tmp_path / "old.jsonl"), lambda _: None)
    assert "checksum" not in (tmp_path / "old.jsonl").read_text()
    import_all(copied, tmp_path / "old.jsonl", Conflict.REFUSE, lambda _: None)
    with filling(copied) as fill:
        result = checked(copied, fill=fill)
    assert (result.findings, result.unsummed, result.filled) == ([], 6, 6)
    assert checked(copied).unsummed == 0 and checksums_of(copied) == written


async def test_checksums_of_a_file_that_a_server_uses_are_not_filled(tmp_path: Path) -> None:
    store = Store.open(url := f"sqlite:///{tmp_path / 'grove.db'}")
    try:
        with pytest.raises(ConfigurationError, match="in use by another server"), filling(url):
            pass
    finally:
        await store.close()


def test_a_checksum_does_not_depend_on_the_release() -> None:
    row: dict[str, Any] = dict.fromkeys(interactions.c.keys())
    row |= {"id": "a", "seq": 3, "aligned": True, "created_at": 0.1, "output_ids": b"\x01\x00\x00\x00", "model": "é"}
    row["status"] = "complete"
    digest = checksums.of_turn(row)
    assert digest.hex() == "3034ef64335d7c00a7a01e4883039059"
    assert checksums.of_turn({**row, "aligned": 1, "rewards": b"x", "later": 5}) == digest
