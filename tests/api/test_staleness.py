"""No session gets older than the trainer allows: how many may start follows from the version of the weights.

(max staleness + version + 1) * batch size - (accepted + running), as AReaL's staleness manager has it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.errors import ConfigurationError
from proxy.settings import Settings
from proxy.store.pruning import prune
from tests.databases import execute
from tests.support import Server, says, serving, user


async def start(server: Server, **body: Any) -> httpx.Response:
    return await server.post("/rl/start_session", {"task_id": "t", **body})


async def room(server: Server) -> int:
    """How many sessions may start now; they are then running."""
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
        versions = {shown["session_id"]: shown["weight_version"] for shown in listed}
        assert versions == {"before": 0, "named-before": 0, "after": 7, "named-after": 7}
        for name, version in versions.items():
            assert (await server.http.get(f"/rl/sessions/{name}")).json()["weight_version"] == version


@pytest.mark.parametrize(("max_staleness", "batch_size"), [(0, 1), (0, 3), (2, 2)])
async def test_so_many_may_start_as_the_formula_says(
    tmp_path: Path, database_url: str, max_staleness: int, batch_size: int
) -> None:
    settings = {"max_staleness": max_staleness, "batch_size": batch_size, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        taken = 0
        for version in (0, 1, 3):
            await train(server, version)
            taken += await room(server)
            assert taken == (max_staleness + version + 1) * batch_size


async def test_what_was_accepted_counts_and_what_failed_gives_its_place_back(tmp_path: Path, database_url: str) -> None:
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
            for _ in range(2):  # ending twice gives nothing back twice
                await server.ok(f"/{running[0]}/rl/end_session", {"outcome": outcome})
            assert await room(server) == 1


async def test_an_expired_session_gives_its_place_back(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 2, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        assert await room(server) == 2
        execute(database_url, "UPDATE sessions SET status = 'expired' WHERE session_id = 't-0'")
        assert await room(server) == 1


async def test_of_many_starts_at_once_only_so_many_succeed(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 3, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        responses = await asyncio.gather(*(start(server, session_id=f"s{n}") for n in range(8)))
        assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 5


async def test_replicas_share_the_room(tmp_path: Path, postgres_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 3, "database_url": postgres_url}
    async with serving(tmp_path, says(), **settings) as one, serving(tmp_path, says(), **settings) as two:
        asked = [start((one, two)[n % 2], session_id=f"s{n}") for n in range(8)]
        responses = await asyncio.gather(*asked)
        assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 5


async def test_sessions_that_are_only_named_take_their_place_too(tmp_path: Path, database_url: str) -> None:
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
    """Delete what has ended, as if it were exported and old; how many sessions that were."""
    execute(url, "UPDATE sessions SET ended_at = 1.0, exported_at = 2.0 WHERE ended_at IS NOT NULL")
    return prune(url, 60.0, dry_run=False).sessions


async def test_sessions_that_were_pruned_stay_counted(tmp_path: Path, database_url: str) -> None:
    settings = {"max_staleness": 0, "batch_size": 3, "database_url": database_url}
    async with serving(tmp_path, says(), **settings) as server:
        assert [(await start(server, session_id=name)).status_code for name in "abc"] == [200] * 3
        await server.ok("/a/rl/end_session", {"outcome": "Finished"})
        await server.ok("/b/rl/end_session", {"outcome": "Failed"})
    assert prune_ended(database_url) == 2
    async with serving(tmp_path, says(), **settings) as server:
        assert await room(server) == 1  # in the place of b; a was trained on
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
