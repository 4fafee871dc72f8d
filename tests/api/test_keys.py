"""Access rules: agents sample, the environment rewards and ends sessions, the administrator does the rest."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engine.scripted.scripts import Reply, Script
from tests.support import Server, sampled, serving, user

ADMIN = {"authorization": "Bearer admin"}
KEY = "key-of-slot-seventeen"


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def start(server: Server, session: str = "s", **more: Any) -> Any:
    body = {"task_id": "t", "session_id": session, **more}
    return await server.ok("/rl/start_session", body, headers=ADMIN)


async def speak(server: Server, key: str, path: str = "/v1") -> httpx.Response:
    body = {"model": "m", "messages": [user("hi")]}
    return await server.post(f"{path}/chat/completions", body, headers=bearer(key))


CONTROL = [("/rl/set_reward", {"reward": 1}), ("/rl/end_session", {})]


@pytest.mark.parametrize("by_path", [True, False])
@pytest.mark.parametrize(("path", "body"), CONTROL)
@pytest.mark.parametrize(
    ("rewards_by", "key", "status"),
    [
        (None, "api_key", 403),
        ("control", "api_key", 403),
        ("session", "api_key", 200),
        (None, "control_key", 200),
        ("session", "control_key", 200),
    ],
)
async def test_rewarding_and_ending_on_a_keyed_server(
    tmp_path: Path, rewards_by: str | None, key: str, status: int, path: str, body: dict[str, Any], by_path: bool
) -> None:
    async with serving(tmp_path, always(), admin_key="admin", rewards_by=rewards_by) as server:
        started = await start(server)
        assert (await speak(server, started["api_key"])).status_code == 200
        response = await server.post(f"/s{path}" if by_path else path, body, headers=bearer(started[key]))
        assert response.status_code == status, response.text
        if status == 403:
            assert response.json()["error"]["code"] == "forbidden"


@pytest.mark.parametrize(("path", "body"), CONTROL)
async def test_the_capability_path_rewards_if_agents_may(tmp_path: Path, path: str, body: dict[str, Any]) -> None:
    async with serving(tmp_path, always(), admin_key="admin", rewards_by="session") as server:
        started = await start(server)
        await speak(server, started["api_key"])
        capability = "/" + started["root_url"].split("/", 3)[3]
        assert (await server.post(capability + path, body, headers=bearer("DUMMY"))).status_code == 200


@pytest.mark.parametrize(("path", "body"), CONTROL)
async def test_the_admin_key_rewards_and_ends_by_path_and_no_key_gets_401(
    tmp_path: Path, path: str, body: dict[str, Any]
) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        started = await start(server)
        await speak(server, started["api_key"])
        capability = "/" + started["root_url"].split("/", 3)[3]
        for headers in ({}, bearer("stranger")):
            for address, status in (("/s", 401), ("", 401), (capability, 403)):
                response = await server.post(address + path, body, headers=headers)
                assert response.status_code == status, (address, response.text)
        assert (await server.post(path, body, headers=ADMIN)).status_code == 401
        assert (await server.post("/s" + path, body, headers=ADMIN)).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/grant_capacity"),
        ("POST", "/rl/start_session"),
        ("POST", "/export_trajectories"),
        ("GET", "/rl/sessions"),
        ("GET", "/rl/sessions/s"),
        ("GET", "/rl/sessions/s/interactions/0"),
    ],
)
async def test_administration_needs_the_admin_key(tmp_path: Path, method: str, path: str) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        started = await start(server)
        await speak(server, started["api_key"])
        body = {"task_id": "n"} if "start" in path else {}
        expected = {"": 401, "wrong": 403, started["api_key"]: 403, started["control_key"]: 403, "admin": 200}
        for key, status in expected.items():
            headers = bearer(key) if key else {}
            response = await server.http.request(method, path, json=body, headers=headers)
            assert response.status_code == status, (key, response.text)
            if status != 200:
                code = {401: "invalid_api_key", 403: "forbidden"}[status]
                assert response.json()["error"]["code"] == code
        response = await server.http.request(method, path, json=body, headers={"x-api-key": "admin"})
        assert response.status_code == 200


@pytest.mark.parametrize("rewards_by", [None, "session", "control"])
async def test_on_an_open_server_the_agent_rewards_unless_control_is_required(
    tmp_path: Path, rewards_by: str | None
) -> None:
    async with serving(tmp_path, always(), rewards_by=rewards_by) as server:
        started = await start(server)
        await speak(server, started["api_key"])
        status = 403 if rewards_by == "control" else 200
        for path in ("/rl/set_reward", "/s/rl/set_reward"):
            response = await server.post(path, {"reward": 1}, headers=bearer(started["api_key"]))
            assert response.status_code == status
            response = await server.post(path, {"reward": 1}, headers=bearer(started["control_key"]))
            assert response.status_code == 200
        bare = await server.post("/s/rl/set_reward", {"reward": 1})
        assert bare.status_code == (401 if rewards_by == "control" else 200)


async def test_keys_of_one_session_never_work_on_another(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin", rewards_by="session") as server:
        a, b = await start(server, "a"), await start(server, "b")
        await speak(server, b["api_key"])
        for key in (a["api_key"], a["control_key"]):
            assert (await speak(server, key, "/b/v1")).status_code == 401
            for path, body in CONTROL:
                response = await server.post(f"/b{path}", body, headers=bearer(key))
                assert response.status_code == 401, response.text
        shown = (await server.http.get("/rl/sessions/b", headers=ADMIN)).json()
        assert shown["status"] == "active" and len(shown["interactions"]) == 1
        assert shown["interactions"][0]["reward"] is None


async def test_a_chosen_key_moves_to_the_next_session_after_the_end(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        first = await start(server, "one", api_key=KEY)
        assert first["api_key"] == KEY
        taken = await server.post("/rl/start_session", {"task_id": "t", "api_key": KEY}, headers=ADMIN)
        assert (taken.status_code, taken.json()["error"]["code"]) == (400, "key_in_use")
        assert taken.json()["error"]["param"] == "api_key"
        await server.ok("/rl/end_session", {}, headers=bearer(first["control_key"]))
        closed = await speak(server, KEY)
        assert (closed.status_code, closed.json()["error"]["code"]) == (403, "session_closed")
        await start(server, "two", api_key=KEY)
        assert (await speak(server, KEY)).status_code == 200
        assert (await speak(server, KEY, "/one/v1")).status_code == 401
        shown = (await server.http.get("/rl/sessions/two", headers=ADMIN)).json()
        assert len(shown["interactions"]) == 1
        # The control key of the first session still rewards that session.
        again = await server.ok("/rl/end_session", {}, headers=bearer(first["control_key"]))
        assert again == {"interaction_count": 0}


async def test_of_two_concurrent_starts_with_one_key_only_one_succeeds(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        body = {"task_id": "t", "api_key": KEY}
        responses = await asyncio.gather(*(server.post("/rl/start_session", body) for _ in range(8)))
        assert sorted(response.status_code for response in responses) == [200] + [400] * 7


async def test_chosen_keys_beyond_loopback_need_a_setting(tmp_path: Path) -> None:
    for allowed in (False, True):
        folder = tmp_path / str(allowed)
        folder.mkdir()
        settings = {"host": "0.0.0.0", "admin_key": "admin-beyond-loopback", "allow_chosen_keys": allowed}
        async with serving(folder, always(), **settings) as server:
            response = await server.post(
                "/rl/start_session", {"task_id": "t", "api_key": KEY}, headers=bearer("admin-beyond-loopback")
            )
            assert response.status_code == (200 if allowed else 400)
            if not allowed:
                assert response.json()["error"]["param"] == "api_key"


@pytest.mark.parametrize("key", ["", 17, ["17"], {}, True, "a key", " a", "a\n", "schlüssel", "a/b", "a@b"])
async def test_a_chosen_key_must_be_a_text_that_headers_and_addresses_can_have(tmp_path: Path, key: Any) -> None:
    async with serving(tmp_path, always()) as server:
        response = await server.post("/rl/start_session", {"task_id": "t", "api_key": key})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "api_key")


async def test_a_chosen_key_that_others_could_guess_is_refused_on_a_keyed_server(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="an-admin-key-of-some-length,another") as server:
        headers = bearer("another")
        for key, said in (("7", "fewer than 16 characters"), ("an-admin-key-of-some-length", "is an admin key")):
            refused = await server.post("/rl/start_session", {"task_id": "t", "api_key": key}, headers=headers)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "api_key")
            assert said in refused.json()["error"]["message"] and key not in refused.json()["error"]["message"].split()
        assert (await server.http.get("/rl/sessions", headers=headers)).json()["sessions"] == []
        await server.ok("/rl/start_session", {"task_id": "t", "api_key": "x" * 16}, headers=headers)


async def test_the_database_stores_no_key_in_plain_text(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'test.db'}"
    async with serving(tmp_path, always(), admin_key="admin-secret-key", database_url=url) as server:
        headers = bearer("admin-secret-key")
        body = {"task_id": "t", "api_key": "chosen-agent-key"}
        started = await server.ok("/rl/start_session", body, headers=headers)
        await speak(server, started["api_key"])
        await server.ok("/rl/end_session", {}, headers=bearer(started["control_key"]))
    secret = started["root_url"].rpartition("~")[2]
    stored = (tmp_path / "test.db").read_bytes()
    for key in (started["api_key"], started["control_key"], secret, "admin-secret-key"):
        assert key.encode() not in stored
    connection = sqlite3.connect(tmp_path / "test.db")
    row = connection.execute("select api_key_hash, control_key_hash, path_key_hash from sessions").fetchone()
    connection.close()
    assert all(len(value) == 64 for value in row)


async def test_keys_work_after_a_restart(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        live, ended = await start(server, "live"), await start(server, "ended", api_key=KEY)
        await speak(server, live["api_key"])
        await speak(server, KEY)
        await server.ok("/rl/end_session", {}, headers=bearer(ended["control_key"]))
    async with serving(tmp_path, always(), admin_key="admin") as server:
        assert (await speak(server, live["api_key"])).status_code == 200
        assert (await speak(server, live["api_key"], "/live/v1")).status_code == 200
        body = {"model": "m", "messages": [user("hi")]}
        assert (await server.post(live["base_url"] + "/chat/completions", body)).status_code == 200
        assert (await speak(server, KEY)).json()["error"]["code"] == "session_closed"
        await server.ok("/rl/set_reward", {"reward": 1}, headers=bearer(live["control_key"]))
        await server.ok("/rl/set_reward", {"reward": 1}, headers=bearer(ended["control_key"]))
        assert (await server.post("/rl/set_reward", {"reward": 1}, headers=bearer(KEY))).status_code == 403
        shown = (await server.http.get("/rl/sessions/live", headers=ADMIN)).json()["interactions"]
        assert [node["reason"] for node in shown] == ["first", *["resampled"] * 3]
        assert [node["reward"] for node in shown] == [None, None, None, 1.0]


@pytest.mark.parametrize("header", ["Basic admin", "Bearer", "Bearer  ", "admin", ""])
async def test_a_malformed_authorization_header_is_no_key(tmp_path: Path, header: str) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        response = await server.http.get("/rl/sessions", headers={"authorization": header})
        assert response.status_code == 401


@pytest.mark.parametrize(("require_key", "status"), [(False, 200), (True, 401)])
async def test_require_key_takes_rewards_from_the_path_secret(tmp_path: Path, require_key: bool, status: int) -> None:
    settings = {"admin_key": "admin", "rewards_by": "session", "require_key": require_key}
    async with serving(tmp_path, always(), **settings) as server:
        started = await server.ok("/rl/start_session", {"task_id": "t"}, headers=ADMIN)
        root, own = started["root_url"].removeprefix("http://t"), bearer(started["api_key"])
        await server.ok(f"{root}/v1/chat/completions", {"model": "m", "messages": [user("hi")]}, headers=own)
        assert (await server.post(f"{root}/rl/set_reward", {"reward": 1.0})).status_code == status
        assert (await server.post(f"{root}/rl/set_reward", {"reward": 1.0}, headers=own)).status_code == 200


async def feedback_key(server: Server, started: Any) -> str:
    body, control = {"keys": ["feedback"]}, bearer(started["control_key"])
    return str((await server.ok("/rl/rotate_keys", body, headers=control))["feedback_key"])


async def test_a_feedback_key_rewards_turns_of_its_session_by_id_and_does_nothing_else(
    tmp_path: Path, database_url: str
) -> None:
    async with serving(tmp_path, always(), admin_key="admin", database_url=database_url) as server:
        mine, others = await start(server), await start(server, "other")
        key = await feedback_key(server, mine)
        turn = (await speak(server, mine["api_key"])).json()["id"]
        foreign = (await speak(server, others["api_key"])).json()["id"]
        good = {"interaction_id": turn, "reward": 1.0}
        for path in ("", "/s"):
            assert await server.ok(f"{path}/rl/set_reward", good, headers=bearer(key)) == {"interaction_ids": [turn]}
        named = await server.post("/rl/set_reward", {**good, "name": "thumb"}, headers=bearer(key))
        assert named.status_code == 200
        refused = [
            ("/rl/set_reward", {"reward": 1.0}, 403),
            ("/rl/set_reward", {"rewards": {turn: 1.0}}, 403),
            ("/rl/set_reward", {**good, "interaction_id": foreign}, 404),
            ("/other/rl/set_reward", good, 403),
            ("/rl/end_session", {}, 403),
            ("/rl/mark", {"interaction_id": turn, "trainable": False}, 403),
            ("/rl/withdraw_session", {}, 403),
            ("/s/rl/rotate_keys", {}, 403),
            ("/trajectories/export", {"session_id": "s"}, 403),
            ("/trajectories/claim", {}, 403),
            ("/rl/start_session", {"task_id": "t"}, 403),
            ("/v1/chat/completions", {"model": "m", "messages": [user("hi")]}, 401),
            ("/s/v1/chat/completions", {"model": "m", "messages": [user("hi")]}, 401),
        ]
        for path, body, status in refused:
            response = await server.post(path, body, headers=bearer(key))
            assert response.status_code == status, (path, body, response.text)
        for path in ("/rl/sessions", "/rl/sessions/s", f"/rl/sessions/s/interactions/{turn}", "/rl/webhooks"):
            assert (await server.http.get(path, headers=bearer(key))).status_code == 403
        await server.ok("/s/rl/end_session", {}, headers=bearer(mine["control_key"]))
        assert (await server.post("/rl/set_reward", good, headers=bearer(key))).status_code == 200


async def test_a_rotation_of_all_keys_replaces_the_feedback_key(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, always(), admin_key="admin", database_url=database_url) as server:
        started = await start(server)
        assert "feedback_key" not in started
        key = await feedback_key(server, started)
        turn = (await speak(server, started["api_key"])).json()["id"]
        renewed = await server.ok("/s/rl/rotate_keys", {}, headers=ADMIN)
        good = {"interaction_id": turn, "reward": 1.0}
        assert (await server.post("/rl/set_reward", good, headers=bearer(key))).status_code == 401
        assert (await server.post("/rl/set_reward", good, headers=bearer(renewed["feedback_key"]))).status_code == 200


async def test_a_feedback_key_begins_no_session_on_an_open_server(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        key = await feedback_key(server, await start(server))
        assert (await speak(server, key)).status_code == 403
