"""Pruning deletes only whole sessions that ended long ago and were exported, acknowledged or expired."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import orjson
import pytest
from typer.testing import CliRunner

from proxy.store import database
from proxy.store.pruning import Pruned, prune
from tests.databases import execute
from tests.support import assistant, says, serving, user
from tokengrove import commands
from tokengrove.errors import ConfigurationError

DAY_S = 86_400.0


async def grow(folder: Path, url: str) -> None:
    """Four ended sessions, two of them exported; a live session that was exported; and an expired one."""
    async with serving(folder, says(*"abcdef"), database_url=url) as server:
        for name in ("seen", "seen-recent", "unseen", "live", "expired"):
            await server.chat([user("hello")], session=name)
            if name != "live":
                await server.ok(f"/{name}/rl/end_session", {"reward": 1.0})
            for _ in range(2):  # the first keys are new, the second ones replace them
                await server.ok(f"/{name}/rl/rotate_keys", {})
        await server.ok("/export_trajectories", {"session_ids": ["seen", "seen-recent", "live"]})
    execute(url, "UPDATE sessions SET ended_at = 1.0 WHERE session_id IN ('seen', 'unseen', 'expired')")
    execute(url, "UPDATE sessions SET status = 'expired' WHERE session_id = 'expired'")


def left(url: str, table: str = "sessions") -> set[str]:
    return {row[0] for row in execute(url, f"SELECT session_id FROM {table}")}


async def test_only_old_sessions_that_were_exported_or_expired_go(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    everything = left(database_url)
    would = prune(database_url, DAY_S, dry_run=True)
    assert (would.sessions, would.interactions, would.kept) == (2, 2, 1)
    assert would.tokens > 0
    assert left(database_url) == everything
    told: list[int] = []
    assert prune(database_url, DAY_S, dry_run=False, progress=told.append) == would
    assert told == [2]
    assert left(database_url) == left(database_url, "interactions") == {"seen-recent", "unseen", "live"}
    assert left(database_url, "withdrawn_keys") == left(database_url)
    assert execute(database_url, "SELECT count(*) FROM returns") == [(2,)]
    assert prune(database_url, DAY_S, dry_run=False) == Pruned(0, 0, 0, 1)


async def test_pruned_tokens_are_those_that_the_turns_add(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    async with serving(tmp_path, says("a", "b"), database_url=url) as server:
        answer = await server.answer([user("hello")])
        await server.chat([user("hello"), assistant(answer["content"]), user("more")])
        await server.ok("/s/rl/end_session", {})
    execute(url, "UPDATE sessions SET ended_at = 1.0, acknowledged_at = 2.0")
    assert execute(url, "SELECT count(*) FROM interactions WHERE prefix_length > 0") == [(1,)]
    [(stored_bytes,)] = execute(url, "SELECT sum(length(prompt_suffix) + length(output_ids)) FROM interactions")
    assert prune(url, DAY_S, dry_run=True).tokens == stored_bytes // 4


async def test_the_begun_calls_of_a_pruned_session_go_with_it(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    execute(
        url, "INSERT INTO intents (interaction_id, session_id, begun_at) VALUES ('i', 'seen', 1.0), ('j', 'live', 1.0)"
    )
    prune(url, DAY_S, dry_run=False)
    assert left(url, "intents") == {"live"}


async def test_acknowledged_sessions_are_pruned_too(tmp_path: Path, database_url: str) -> None:
    await grow(tmp_path, database_url)
    execute(database_url, "UPDATE sessions SET acknowledged_at = 2.0 WHERE session_id = 'unseen'")
    assert prune(database_url, DAY_S, dry_run=False).kept == 0
    assert left(database_url) == {"seen-recent", "live"}


async def test_an_export_that_was_cut_does_not_count(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("a"), database_url=database_url) as server:
        await server.chat([user("hello")])
        await server.ok("/s/rl/end_session", {})
        assert (await server.post("/export_trajectories", {"session_id": "s", "layout": "round"})).status_code == 400
    assert execute(database_url, "SELECT exported_at FROM sessions") == [(None,)]


async def test_a_session_that_changes_during_its_export_does_not_count_as_exported(
    tmp_path: Path, database_url: str
) -> None:
    async with serving(tmp_path, says("a", "b"), database_url=database_url) as server:
        await server.chat([user("hello")])
        exported, bodies = bytearray(), [b'{"session_id": "s"}']

        async def receive() -> dict[str, Any]:
            if not bodies:
                await asyncio.Event().wait()
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}

        async def send(message: Any) -> None:
            """A slow client: after it received the first sample, the agent takes another turn and the session ends."""
            if message.get("body") and not exported:
                await server.chat([user("one more")])
                await server.ok("/s/rl/end_session", {})
            exported.extend(message.get("body", b""))

        path = "/export_trajectories"
        scope = {"type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b""}
        await server.app(
            {**scope, "headers": [(b"content-type", b"application/json")], "http_version": "1.1", "scheme": "http"},
            receive,
            send,
        )
        assert len(orjson.loads(exported)["samples"]) == 1
    assert execute(database_url, "SELECT status, next_seq, exported_at FROM sessions") == [("ended", 2, None)]


async def test_a_file_that_is_served_is_refused(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    async with serving(tmp_path, says(), database_url=url):
        with pytest.raises(ConfigurationError, match="in use by another server"):
            prune(url, DAY_S, dry_run=True)


async def test_a_sqlite_file_gives_its_space_back(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    execute(url, "UPDATE interactions SET error = hex(randomblob(500000)) WHERE session_id = 'seen'")
    before = (tmp_path / "test.db").stat().st_size
    prune(url, DAY_S, dry_run=False)
    assert (tmp_path / "test.db").stat().st_size < before - 900_000


async def test_the_command_prints_the_numbers_of_pruned_and_kept_sessions(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)
    ran = CliRunner().invoke(commands.app, ["db", "prune", "--older-than", "30d", "--database-url", url])
    assert ran.exit_code == 0
    assert ran.output.startswith("deleted 2 sessions, 2 interactions, ")
    assert "kept 1 sessions of that age that were never exported" in ran.output


@pytest.mark.parametrize("text", ["30", "d", "-1d", "1.5h", "30 days", ""])
def test_an_invalid_duration_is_refused_by_name(text: str) -> None:
    ran = CliRunner().invoke(commands.app, ["db", "prune", "--older-than", text])
    assert isinstance(ran.exception, ConfigurationError) or ran.exit_code == 2
    assert "--older-than" in str(ran.exception) + ran.output


async def test_a_disk_without_room_to_shrink_the_file_is_named_after_the_sessions_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    await grow(tmp_path, url)

    def connect(*_: Any, **__: Any) -> sqlite3.Connection:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(database, "connect", connect)
    with pytest.raises(ConfigurationError, match=r"deleted, but .* cannot be made smaller: database or disk is full"):
        prune(url, DAY_S, dry_run=False)
    assert left(url) == {"seen-recent", "unseen", "live"}
