"""`--keep-days` and `--keep`: old sessions go by the first rule that fits, and others stay."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import Settings
from proxy.settings.retention import Rule, read_rules
from proxy.store.archive import access
from proxy.store.database import parse_url, writer_engine
from tests.databases import execute
from tests.support import Server, says, serving, user
from tokengrove.errors import ConfigurationError


def left(url: str) -> set[str]:
    return {row[0] for row in execute(url, "SELECT session_id FROM sessions")}


async def grow(server: Server, *names: str, exported: bool = True, **start: Any) -> None:
    for name in names:
        await server.ok("/rl/start_session", {"session_id": name, **start})
        await server.chat([user(name)], session=name)
        await server.ok(f"/{name}/rl/end_session", {})
    if exported:
        await server.ok("/trajectories/export", {"session_ids": list(names)})
        await server.ok("/rl/grant_capacity", {"n": 1})  # its commit comes after the note of the export


async def test_the_first_rule_that_fits_a_session_decides(
    tmp_path: Path, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    rules = ("group=eval-*:1d", "group=base,step<10:forever", "step<1000:0s", "group=smoke:0s:unexported")
    async with serving(tmp_path, says(*"abcdefghij"), database_url=database_url, keep=rules) as server:
        await grow(server, "eval", group_id="eval-1", metadata={"step": 1})
        await grow(server, "kept", group_id="base", metadata={"step": 9})
        await grow(server, "old-step", group_id="base", metadata={"step": 10})
        await grow(server, "later-step", "no-step", metadata={"step": 1000})
        await grow(server, "text-step", metadata={"step": "1"})
        await grow(server, "unseen-step", exported=False, metadata={"step": 5})
        await grow(server, "smoke", exported=False, group_id="smoke")
        await server.chat([user("live")], session="live")
        everything = left(database_url)
        with caplog.at_level(logging.INFO, "proxy.sessions.retention"):
            assert await server.app.state.retention.sweep() == 2
        assert left(database_url) == everything - {"old-step", "smoke"}
        assert "old sessions removed" in caplog.text
        assert (await server.http.get("/rl/sessions/old-step")).status_code == 404
        assert 'tokengrove_sessions_removed_total{how="deleted"} 2' in (await server.http.get("/metrics")).text
        assert await server.app.state.retention.sweep() == 0


async def test_keep_days_counts_from_the_end_of_a_session(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*"abc"), database_url=database_url, keep_days=2.0) as server:
        await grow(server, "old", "new")
        await grow(server, "unseen", exported=False)
        execute(database_url, "UPDATE sessions SET ended_at = ended_at - 259200 WHERE session_id <> 'new'")
        assert await server.app.state.retention.sweep() == 1
        assert left(database_url) == {"new", "unseen"}


async def test_old_sessions_move_to_the_archive_if_there_is_one(tmp_path: Path, database_url: str) -> None:
    settings: dict[str, Any] = {"keep_days": 0.0, "archive_to": str(tmp_path / "archive")}
    async with serving(tmp_path, says(*"abc"), database_url=database_url, **settings) as server:
        await grow(server, "s", "other")
        before = await server.ok("/trajectories/export", {"session_ids": ["s", "other"]})
        assert await server.app.state.retention.sweep() == 2
        assert left(database_url) == set()
        assert (await server.http.get("/rl/sessions/s")).status_code == 410
        assert await server.ok("/trajectories/export", {"session_ids": ["s", "other"]}) == before
        assert 'tokengrove_sessions_removed_total{how="archived"} 2' in (await server.http.get("/metrics")).text
        assert (await server.http.delete("/rl/sessions/s")).status_code == 200


async def test_one_server_of_a_database_sweeps_at_a_time(tmp_path: Path, postgres_url: str) -> None:
    async with serving(tmp_path, says("a"), database_url=postgres_url, keep_days=0.0) as server:
        await grow(server, "s")
        engine = writer_engine(parse_url(postgres_url))
        with engine.connect() as connection:
            connection.exec_driver_sql(f"SELECT pg_advisory_lock({access._SWEEP})")
            assert await server.app.state.retention.sweep() == 0
        engine.dispose()
        assert await server.app.state.retention.sweep() == 1


async def test_nothing_is_swept_by_default(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a")) as server:
        assert server.app.state.retention is None


def test_rules_are_read_in_order_and_keep_days_comes_last() -> None:
    assert read_rules(2.0, ("group=a-?,step<7:90m", "step<3:forever", "group=b:5s:unexported")) == (
        Rule(5400.0, "a-?", 7),
        Rule(None, None, 3),
        Rule(5.0, "b", None, unexported=True),
        Rule(172_800.0),
    )


@pytest.mark.parametrize(
    "rule", ["", ":1d", "group=a", "group=a:1w", "group=:1d", "step=3:1d", "step<x:1d", "step<3:forever:unexported"]
)
def test_a_rule_that_is_none_is_refused(rule: str) -> None:
    with pytest.raises(ConfigurationError, match="--keep"):
        Settings(keep=(rule,))


def test_an_archive_without_a_rule_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--archive-to has no effect"):
        Settings(archive_to="folder")
