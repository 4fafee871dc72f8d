"""A control call with an Idempotency-Key is done once, however often it is sent, and is always answered the same."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from proxy.store.sql import answers
from tests.api.test_replicas import replicas
from tests.databases import execute
from tests.support import Server, says, serving, user

ADMIN = "admin-key-of-the-tests"
ALL = {"admin_key": ADMIN}


def keyed(name: str, key: str = ADMIN) -> dict[str, str]:
    return {"idempotency-key": name, "authorization": f"Bearer {key}"}


async def sent(server: Server, path: str, body: Any, name: str, key: str = ADMIN, method: str = "POST") -> Any:
    return await server.http.request(method, path, json=body, headers=keyed(name, key))


async def done(server: Server, path: str, body: Any, name: str, key: str = ADMIN, method: str = "POST") -> Any:
    response = await sent(server, path, body, name, key, method)
    assert response.status_code == 200, response.text
    return response.json(), response.headers.get("x-tokengrove-session")


async def test_every_control_call_is_answered_the_same_again_also_after_a_restart(
    tmp_path: Path, database_url: str
) -> None:
    first: dict[str, Any] = {}
    chosen = {"session_id": "s", "api_key": "the-key-of-the-agent"}
    async with serving(tmp_path, says("a", "b", "c"), database_url=database_url, **ALL) as server:
        for _ in range(2):
            for name, path, body in (
                ("grant", "/rl/grant_capacity", {"n": 2}),
                ("chosen", "/rl/start_session", chosen),
                ("named", "/rl/start_session", {"task_id": "t"}),
            ):
                answer = await done(server, path, body, name)
                assert first.setdefault(name, answer) == answer
        control = first["chosen"][0]["control_key"]
        agent = {"authorization": f"Bearer {chosen['api_key']}"}
        ask = {"model": "m", "messages": [user("hi")]}
        assert (await server.post("/s/v1/chat/completions", ask, headers=agent)).status_code == 200
        reward, mark = ("/s/rl/set_reward", {"reward": 1.0}), ("/s/rl/mark", {"turn": 0, "trainable": False})
        first["reward"] = await done(server, *reward, "reward", control)
        first["mark"] = await done(server, *mark, "mark", control)
        again = {"model": "m", "messages": [user("more")]}
        assert (await server.post("/s/v1/chat/completions", again, headers=agent)).status_code == 200
        end = "/s/rl/end_session", {"outcome": "Finished"}
        first["end"] = await done(server, *end, "end", control)
        for name, (path, body) in {"reward": reward, "mark": mark, "end": end}.items():
            assert await done(server, path, body, name, control) == first[name], name
        first["rotate"] = await done(server, "/s/rl/rotate_keys", {}, "rotate", control)
        first["delete"] = await done(server, "/rl/sessions/t-0", {}, "delete", method="DELETE")
    async with serving(tmp_path, says("d"), database_url=database_url, **ALL) as server:
        calls = {
            "grant": ("/rl/grant_capacity", {"n": 2}, ADMIN, "POST"),
            "chosen": ("/rl/start_session", chosen, ADMIN, "POST"),
            "named": ("/rl/start_session", {"task_id": "t"}, ADMIN, "POST"),
            "rotate": ("/s/rl/rotate_keys", {}, control, "POST"),  # by the key that it has replaced
            "delete": ("/rl/sessions/t-0", {}, ADMIN, "DELETE"),
        }
        for name, (path, body, key, method) in calls.items():
            assert await done(server, path, body, name, key, method) == first[name], name
        tree = await server.http.get("/rl/sessions/s", headers=keyed("-"))
        assert [turn["reward"] for turn in tree.json()["interactions"]] == [1.0, None]
        listed = await server.http.get("/rl/sessions", headers=keyed("-"))
        assert [entry["session_id"] for entry in listed.json()["sessions"]] == ["s"]
    assert execute(database_url, "SELECT available FROM capacity WHERE name = 'starts'") == [(2,)]


async def test_a_reward_without_a_turn_goes_to_one_turn_only(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("a", "b"), database_url=database_url) as server:
        await server.chat([user("hi")])
        headers = {"idempotency-key": "once"}
        first = await server.ok("/s/rl/set_reward", {"reward": 2.0}, headers=headers)
        await server.chat([user("more")])
        assert await server.ok("/s/rl/set_reward", {"reward": 2.0}, headers=headers) == first
        assert [turn["reward"] for turn in await server.tree()] == [2.0, None]


async def test_a_key_with_another_path_or_body_is_refused_by_name(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("a"), database_url=database_url, **ALL) as server:
        await done(server, "/rl/start_session", {"session_id": "s"}, "one")
        for path, body in (("/rl/start_session", {"session_id": "r"}), ("/rl/grant_capacity", {"n": 1})):
            refused = await sent(server, path, body, "one")
            error = refused.json()["error"]
            assert (refused.status_code, error["code"]) == (409, "idempotency_mismatch")
            assert (error["param"], refused.headers["x-should-retry"]) == ("Idempotency-Key", "false")
        for name in ("", "a b", "x" * 256):
            refused = await sent(server, "/rl/grant_capacity", {"n": 1}, name)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
        assert (await sent(server, "/rl/start_session", {"session_id": "s"}, "two")).status_code == 400


async def test_equal_calls_at_once_on_two_servers_are_done_once(tmp_path: Path, postgres_url: str) -> None:
    async with replicas(tmp_path, postgres_url, says("a"), says("b"), **ALL) as servers:
        for name, path, body in (
            ("grant", "/rl/grant_capacity", {"n": 3}),
            ("start", "/rl/start_session", {"session_id": "s", "api_key": "k" * 16}),
            ("task", "/rl/start_session", {"task_id": "t"}),
        ):
            both = await asyncio.gather(*(done(server, path, body, name) for server in servers for _ in range(3)))
            assert all(answer == both[0] for answer in both)
        assert execute(postgres_url, "SELECT available FROM capacity WHERE name = 'starts'") == [(3,)]
        assert execute(postgres_url, "SELECT count(*) FROM sessions") == [(2,)]


async def test_a_claim_that_is_repeated_gets_the_same_sessions(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("a", "b"), database_url=database_url) as server:
        for name in ("one", "two"):
            await server.chat([user("hi")], session=name)
            await server.ok(f"/{name}/rl/end_session", {})
        headers = {"idempotency-key": "claim"}
        claims = [await server.ok("/trajectories/claim", {"limit": 1}, headers=headers) for _ in range(2)]
        assert claims[0]["claim_id"] == claims[1]["claim_id"]
        assert [[entry["session_id"] for entry in claim["sessions"]] for claim in claims] == [["one"], ["one"]]


async def test_answers_are_kept_for_a_day_and_show_no_key(
    tmp_path: Path, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, says("a"), database_url=database_url, **ALL) as server:
        started, _ = await done(server, "/rl/start_session", {"session_id": "s"}, "start")
        [(answer,)] = execute(database_url, "SELECT answer FROM answers")
        assert started["control_key"].encode() not in bytes(answer) and b"control_key" not in bytes(answer)
        monkeypatch.setattr(answers, "KEPT_S", -1.0)
        await done(server, "/rl/grant_capacity", {"n": 1}, "grant")
        assert (await sent(server, "/rl/start_session", {"session_id": "s"}, "start")).status_code == 400
        assert len(execute(database_url, "SELECT * FROM answers")) == 1


async def test_one_key_for_two_sessions_that_headers_name_is_refused_by_name(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says("a", "b"), database_url=database_url) as server:
        for name in ("one", "two"):
            await server.chat([user("hi")], session=name)
        named = [{"idempotency-key": "k", "x-session-id": name} for name in ("one", "two")]
        assert (await server.post("/rl/set_reward", {"reward": 1.0}, headers=named[0])).status_code == 200
        refused = await server.post("/rl/set_reward", {"reward": 1.0}, headers=named[1])
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "idempotency_mismatch")
