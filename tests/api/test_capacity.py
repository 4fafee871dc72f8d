"""Limits on started sessions, live sessions and running turns: a full limit answers 429 with retry-after."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engine.interface import PauseMode
from tests.support import Server, says, serving, until, user
from tests.wide import CROSSED


async def start(server: Server, **body: Any) -> httpx.Response:
    return await server.post("/rl/start_session", {"task_id": "t", **body})


def assert_full(response: httpx.Response, setting: str) -> None:
    assert response.status_code == 429, response.text
    assert int(response.headers["retry-after"]) >= 1
    assert setting in response.json()["error"]["message"]


async def test_each_start_takes_one_granted_capacity(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(), capacity_control=True, database_url=database_url) as server:
        assert_full(await start(server), "--capacity-control")
        assert await server.ok("/grant_capacity", {}) == {"capacity": 1}
        assert await server.ok("/grant_capacity", {"n": 2}) == {"capacity": 3}
        responses = await asyncio.gather(*(start(server) for _ in range(8)))
        assert sorted(response.status_code for response in responses) == [200] * 3 + [429] * 5


async def test_a_start_that_fails_takes_no_capacity(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(), capacity_control=True, database_url=database_url) as server:
        await server.ok("/grant_capacity", {"n": 2})
        assert (await start(server, session_id="one", api_key="17")).status_code == 200
        assert (await start(server, session_id="one")).status_code == 400
        assert (await start(server, api_key="17")).json()["error"]["code"] == "key_in_use"
        assert (await start(server, session_id="two")).status_code == 200
        assert_full(await start(server), "--capacity-control")


@CROSSED
@pytest.mark.parametrize(
    ("outcome", "given_back"), [("Failed", 1), ("NoData", 1), ("Timeout", 1), ("Finished", 0), (None, 0)]
)
async def test_a_failed_session_returns_its_capacity_once(
    tmp_path: Path, database_url: str, outcome: str | None, given_back: int
) -> None:
    async with serving(tmp_path, says(), capacity_control=True, database_url=database_url) as server:
        await server.ok("/grant_capacity", {})
        session_id = (await start(server)).json()["session_id"]
        for _ in range(2):
            await server.ok(f"/{session_id}/rl/end_session", {"outcome": outcome})
        assert await server.ok("/grant_capacity", {}) == {"capacity": 1 + given_back}


async def test_capacity_survives_a_restart(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(), capacity_control=True, database_url=database_url) as server:
        await server.ok("/grant_capacity", {"n": 2})
        assert (await start(server)).status_code == 200
    async with serving(tmp_path, says(), capacity_control=True, database_url=database_url) as server:
        assert (await start(server)).status_code == 200
        assert_full(await start(server), "--capacity-control")


async def test_a_negative_grant_takes_back_what_is_left(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(), capacity_control=True, database_url=database_url) as server:
        assert await server.ok("/grant_capacity", {"n": -1}) == {"capacity": 0}
        assert await server.ok("/grant_capacity", {"n": 3}) == {"capacity": 3}
        assert (await start(server)).status_code == 200
        assert await server.ok("/grant_capacity", {"n": -1}) == {"capacity": 1}
        assert await server.ok("/grant_capacity", {"n": -2}) == {"capacity": 0}
        assert_full(await start(server), "--capacity-control")
        refused = await server.post("/grant_capacity", {"n": 0})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")


async def test_without_capacity_control_grants_are_counted_and_nothing_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        assert (await start(server)).status_code == 200
        assert await server.ok("/grant_capacity", {"n": 5}) == {"capacity": 5}
        assert (await server.post("/grant_capacity", {"n": 0})).status_code == 400


async def test_the_limit_of_live_sessions_holds(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*"abc"), max_live_sessions=2, database_url=database_url) as server:
        responses = await asyncio.gather(*(start(server, session_id=f"s{n}") for n in range(5)))
        assert sorted(response.status_code for response in responses) == [200, 200, 429, 429, 429]
        named = await server.post("/other/v1/chat/completions", {"model": "m", "messages": [user("a")]})
        assert_full(named, "--max-live-sessions")
        live = next(n for n, response in enumerate(responses) if response.status_code == 200)
        await server.chat([user("a")], session=f"s{live}")
        await server.ok(f"/s{live}/rl/end_session", {})
        await server.chat([user("a")], session="other")
        assert_full(await start(server), "--max-live-sessions")


async def test_a_named_session_without_a_turn_counts_as_live(tmp_path: Path) -> None:
    async with serving(tmp_path, says("a"), max_live_sessions=1) as server:
        body = {"model": "m", "messages": [user("a")]}
        await server.ok("/one/v1/messages/count_tokens", body)
        assert_full(await server.post("/two/v1/chat/completions", body), "--max-live-sessions")
        await server.ok("/one/v1/chat/completions", body)


PATHS = ("chat/completions", "responses", "messages")


def body_for(path: str, words: str) -> dict[str, Any]:
    turns = {"input": words} if path == "responses" else {"messages": [user(words)]}
    return {"model": "m", "max_tokens": 9, **turns}


@pytest.mark.parametrize("path", PATHS)
async def test_a_turn_beyond_the_limit_is_refused_before_rendering(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, says("one", "two", "three"), max_turns_in_flight=2) as server:
        await server.engine.pause(PauseMode.IN_PLACE)
        running = [asyncio.ensure_future(server.chat([user(words)], session=words)) for words in "ab"]
        await until(lambda: len(server.engine.running) == 2)
        response = await server.post(f"/c/v1/{path}", body_for(path, "c"))
        assert_full(response, "--max-turns-in-flight")
        kind = response.json()["error"]["type"]
        assert kind == ("rate_limit_error" if path == "messages" else kind)
        await server.engine.resume()
        await asyncio.gather(*running)
        assert (await server.post(f"/c/v1/{path}", body_for(path, "c"))).status_code == 200


async def test_choices_count_as_turns(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three"), max_turns_in_flight=2) as server:
        response = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("a")], "n": 3})
        assert_full(response, "--max-turns-in-flight")
        await server.chat([user("a")], n=2)


async def test_a_replay_does_not_count_as_a_turn(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two"), max_turns_in_flight=1) as server:
        first = await server.chat([user("a")])
        await server.engine.pause(PauseMode.IN_PLACE)
        running = asyncio.ensure_future(server.chat([user("b")]))
        await until(lambda: bool(server.engine.running))
        again = await server.ok(
            "/s/v1/chat/completions",
            {"model": "m", "messages": [user("a")]},
            headers={"x-stainless-retry-count": "1"},
        )
        assert again["id"] == first["id"]
        await server.engine.resume()
        await running


async def test_a_waiting_request_without_a_session_counts_once(tmp_path: Path) -> None:
    async with serving(tmp_path, says("one", "two", "three"), max_turns_in_flight=3) as server:
        await server.ok("/engine/pause_generation", {})
        body = {"input_ids": [72, 101]}
        waiting = [asyncio.ensure_future(server.post("/v1/generate", body)) for _ in range(2)]
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 2)
        waiting.append(asyncio.ensure_future(server.chat([user("a")])))
        await until(lambda: server.app.state.turns.routes.main.gate.waiting == 3 or waiting[-1].done())
        assert_full(await server.post("/v1/generate", body), "--max-turns-in-flight")
        await server.ok("/engine/continue_generation", {})
        await asyncio.gather(*waiting)


@CROSSED
@pytest.mark.parametrize("outcome", ["Failed", "NoData", "Timeout", "Finished", None])
async def test_a_start_that_brings_its_grant_leaves_the_capacity_as_it_was(
    tmp_path: Path, database_url: str, outcome: str | None
) -> None:
    async with serving(
        tmp_path, says(), capacity_control=True, max_live_sessions=1, database_url=database_url
    ) as server:
        await server.ok("/grant_capacity", {"n": 2})
        session_id = (await start(server, grant_capacity=True)).json()["session_id"]
        assert_full(await start(server, grant_capacity=True), "--max-live-sessions")
        await server.ok(f"/{session_id}/rl/end_session", {"outcome": outcome})
        assert await server.ok("/grant_capacity", {}) == {"capacity": 3}


async def test_a_grant_that_is_no_boolean_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), capacity_control=True) as server:
        response = await start(server, grant_capacity=1)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "grant_capacity")
