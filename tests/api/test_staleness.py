"""Staleness control: the number of sessions that may start follows from the weight version.

(max staleness + version + 1) * batch size - (accepted + running), as AReaL's staleness manager has it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.settings import Settings
from proxy.store.pruning import prune
from tests.databases import execute
from tests.support import Server, says, serving, user
from tests.wide import CROSSED
from tokengrove.errors import ConfigurationError


async def start(server: Server, **body: Any) -> httpx.Response:
    return await server.post("/rl/start_session", {"task_id": "t", **body})


async def room(server: Server) -> int:
    """Start sessions until one is refused; return their number."""
    started = 0
    while (response := await start(server)).status_code == 200:
        started += 1
    assert_too_stale(response)
    return started


def assert_too_stale(response: httpx.Response) -> None:
    assert response.status_code == 429, response.text
    assert int(response.headers["retry-after"]) >= 1
    assert "--max-staleness" in response.json()["error"]["message"]


async def train(server: Server, version: int) -> None:
    await server.ok("/engine/update_weights", {"path": f"/weights/{version}", "version": version})


async def test_a_session_carries_the_version_at_its_start(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("a", "b"), database_url=database_url) as server:
        await start(server, session_id="before")
        await server.chat([user("a")], "named-before")
        await train(server, 7)
        await start(server, session_id="after")
        await server.chat([user("b")], "named-after")
        await server.ok("/before/rl/end_session", {})
    async with serving(tmp_path, says(), database_url=database_url) as server:
        listed = (await server.http.get("/rl/sessions")).json()["sessions"]
        versions = {shown["session_id"]: shown["version"] for shown in listed}
        assert versions == {"before": 0, "named-before": 0, "after": 7, "named-after": 7}
        for name, version in versions.items():
            assert (await server.http.get(f"/rl/sessions/{name}")).json()["version"] == version


@CROSSED
@pytest.mark.parametrize(("max_staleness", "batch_size"), [(0, 1), (0, 3), (2, 2)])
async def test_the_number_of_starts_follows_the_formula(
    tmp_path: Path, database_url: str, max_staleness: int, batch_size: int
) -> None:
    settings = {"max_staleness": max_staleness, "batch_size": batch_size, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        taken = 0
        for version in (0, 1, 3):
            await train(server, version)
            taken += await room(server)
            assert taken == (max_staleness + version + 1) * batch_size


async def test_accepted_sessions_count_and_failed_ones_return_their_place(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 4, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        assert await room(server) == 4
        for number, outcome in enumerate(("Finished", None)):
            await server.ok(f"/t-{number}/rl/end_session", {"outcome": outcome})
            assert_too_stale(await start(server))
    for outcome in ("Failed", "NoData", "Timeout"):
        async with serving(tmp_path, says(), **settings) as server:
            listed = (await server.http.get("/rl/sessions")).json()["sessions"]
            running = [shown["session_id"] for shown in listed if shown["status"] == "active"]
            for _ in range(2):  # ending twice returns the place once
                await server.ok(f"/{running[0]}/rl/end_session", {"outcome": outcome})
            assert await room(server) == 1


async def test_an_expired_session_returns_its_place(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 2, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        assert await room(server) == 2
        execute(database_url, "UPDATE sessions SET status = 'expired' WHERE session_id = 't-0'")
        assert await room(server) == 1


async def test_concurrent_starts_stay_within_the_limit(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 3, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        responses = await asyncio.gather(*(start(server, session_id=f"s{n}") for n in range(8)))
        assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 5


async def test_replicas_share_the_limit(tmp_path: Path, postgres_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 3, "database_url": postgres_url}
    async with serving(tmp_path, says(), **settings) as one, serving(tmp_path, says(), **settings) as two:
        asked = [start((one, two)[n % 2], session_id=f"s{n}") for n in range(8)]
        responses = await asyncio.gather(*asked)
        assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 5


async def test_sessions_created_by_their_path_count_too(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 2, "database_url": database_url}
    async with serving(tmp_path, says("a", "b", "c"), **settings) as server:
        await server.chat([user("a")], "one")
        assert (await start(server)).status_code == 200
        body = {"model": "m", "messages": [user("b")]}
        assert_too_stale(await server.post("/two/v1/chat/completions", body))
        assert_too_stale(await start(server))
        await server.chat([user("a again")], "one")
        await train(server, 1)
        await server.chat([user("b")], "two")


async def test_a_refused_start_takes_no_granted_capacity(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 1, "database_url": database_url}
    async with serving(tmp_path, says(), capacity_control=True, **settings) as server:
        await server.ok("/grant_capacity", {"n": 2})
        assert await room(server) == 1
        await train(server, 1)
        assert (await start(server)).status_code == 200


def prune_ended(url: str) -> int:
    """Prune the ended sessions as if they were exported and old; return their number."""
    execute(url, "UPDATE sessions SET ended_at = 1.0, exported_at = 2.0 WHERE ended_at IS NOT NULL")
    return prune(url, 60.0, dry_run=False).sessions


async def test_pruned_sessions_stay_counted(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 3, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        assert [(await start(server, session_id=name)).status_code for name in "abc"] == [200] * 3
        await server.ok("/a/rl/end_session", {"outcome": "Finished"})
        await server.ok("/b/rl/end_session", {"outcome": "Failed"})
    assert prune_ended(database_url) == 2
    async with serving(tmp_path, says(), **settings) as server:
        assert await room(server) == 1  # the place of b; a counts as trained
        await server.ok("/c/rl/end_session", {"outcome": "Finished"})
    assert prune_ended(database_url) == 1
    async with serving(tmp_path, says(), **settings) as server:
        assert await room(server) == 0
        await train(server, 1)
        assert await room(server) == 3
        assert await server.ok("/grant_capacity", {}) == {"capacity": 1}


async def test_without_these_settings_nothing_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        for _ in range(20):
            assert (await start(server)).status_code == 200


@pytest.mark.parametrize("half", [{"max_staleness": 1}, {"batch_size": 4}])
def test_one_setting_without_the_other_is_refused(half: dict[str, int]) -> None:
    with pytest.raises(ConfigurationError, match="--max-staleness and --batch-size"):
        Settings(**half)  # type: ignore[arg-type]
