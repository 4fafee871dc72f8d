"""`--refresh-by-key`: a start with the key of a live session ends that session, as in AReaL's online mode."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import Server, says, serving, user
from tests.wide import CROSSED

ADMIN = {"authorization": "Bearer an-admin-key-of-some-length"}


def keyed(tmp_path: Path, database_url: str, **more: Any) -> Any:
    settings = {"admin_key": "an-admin-key-of-some-length", "rewards_by": "session", "refresh_by_key": True, **more}
    return serving(tmp_path, says("one", "two", "three"), database_url=database_url, **settings)


async def start(server: Server, key: str | None = None) -> httpx.Response:
    """The request of AReaL's scripts: `api_key` is null at first, then the key of the answer."""
    return await server.post("/rl/start_session", {"task_id": "demo", "api_key": key}, headers=ADMIN)


async def play(server: Server, key: str, reward: float) -> str:
    """A turn and its reward, with nothing but the key; return the session that they reached."""
    bearer = {"authorization": f"Bearer {key}"}
    turn = await server.post("/chat/completions", {"model": "default", "messages": [user("Hi")]}, headers=bearer)
    assert turn.status_code == 200, turn.text
    rewarded = await server.post("/rl/set_reward", {"reward": reward}, headers=bearer)
    return rewarded.headers["x-tokengrove-session"]


async def shown(server: Server, session_id: str) -> Any:
    return (await server.http.get(f"/rl/sessions/{session_id}", headers=ADMIN)).json()


@CROSSED
async def test_one_key_plays_episode_after_episode_without_an_end(tmp_path: Path, database_url: str) -> None:
    async with keyed(tmp_path, database_url) as server:
        key, played = None, []
        for number in range(3):
            started = (await start(server, key)).json()
            assert key in (None, started["api_key"])
            key = started["api_key"]
            played.append(await play(server, key, float(number)))
            assert played[-1] == started["session_id"]
        assert played == ["demo-0", "demo-1", "demo-2"]
        for number, session_id in enumerate(played):
            session = await shown(server, session_id)
            assert [turn["reward"] for turn in session["interactions"]] == [number]
            ended = ("active", None) if number == 2 else ("ended", "Finished")
            assert (session["status"], session["outcome"]) == ended
        claimed = await server.ok("/trajectories/claim", {"limit": 9}, headers=ADMIN)
        assert [each["session_id"] for each in claimed["sessions"]] == played[:2]


async def test_the_old_session_is_left_to_the_trainer_when_no_start_is_granted(tmp_path: Path) -> None:
    async with keyed(tmp_path, f"sqlite:///{tmp_path}/c.db", capacity_control=True) as server:
        await server.ok("/grant_capacity", {}, headers=ADMIN)
        key = (await start(server)).json()["api_key"]
        await play(server, key, 1.0)
        assert (await start(server, key)).status_code == 429
        assert (await shown(server, "demo-0"))["status"] == "ended"
        await server.ok("/grant_capacity", {}, headers=ADMIN)
        started = (await start(server, key)).json()
        assert await play(server, key, 1.0) == started["session_id"]


async def test_of_concurrent_refreshes_one_session_stays_live(tmp_path: Path) -> None:
    async with keyed(tmp_path, f"sqlite:///{tmp_path}/c.db") as server:
        key = (await start(server)).json()["api_key"]
        answers = await asyncio.gather(*(start(server, key) for _ in range(8)))
        assert {answer.status_code for answer in answers} == {200}
        listed = (await server.http.get("/rl/sessions", headers=ADMIN)).json()["sessions"]
        assert sorted(each["status"] for each in listed) == ["active"] + ["ended"] * 8


@pytest.mark.parametrize("body", [{"api_key": "short"}, {"discount": 2}, {"colour": 1}])
async def test_a_start_with_an_invalid_field_ends_nothing(tmp_path: Path, body: dict[str, Any]) -> None:
    async with keyed(tmp_path, f"sqlite:///{tmp_path}/c.db") as server:
        key = (await start(server)).json()["api_key"]
        refused = await server.post("/rl/start_session", {"task_id": "demo", "api_key": key, **body}, headers=ADMIN)
        assert refused.status_code == 400
        assert (await shown(server, "demo-0"))["status"] == "active"
