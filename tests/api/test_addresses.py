"""Every way to name a session reaches that session and no other; an invalid session id is refused with 400."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.engine.scripted.scripts import Reply, Script
from tests.support import Server, sampled, serving, user
from tests.wide import CROSSED

ADMIN = {"authorization": "Bearer admin"}


def always(text: str = "ok") -> Script:
    reply = Reply(sampled(text), chunk=64)
    return lambda request: reply


async def turn(server: Server, path: str, **more: Any) -> httpx.Response:
    body = {"model": "m", "messages": [user("hi")], **more.pop("body", {})}
    return await server.post(path, body, **more)


async def sessions(server: Server, **more: Any) -> list[str]:
    response = await server.http.get("/rl/sessions", **more)
    return [entry["session_id"] for entry in response.json()["sessions"]]


@CROSSED
@pytest.mark.parametrize(
    ("path", "session"),
    [
        ("s", "s"),
        ("a/b/c", "a/b/c"),
        ("run-1:x@y+z.~", "run-1:x@y+z.~"),
        ("a~b", "a~b"),
        ("x%3Ay", "x:y"),
        ("a%2Fb", "a/b"),
        ("größe/日本", "größe/日本"),
        ("%E6%97%A5", "日"),
        ("a/v1", "a/v1"),
        ("a/rl", "a/rl"),
        ("v11", "v11"),
        ("x" * 200, "x" * 200),
    ],
)
@pytest.mark.parametrize("prefix", ["/{}/v1", "/{}"])
async def test_a_session_in_the_path_is_created_under_its_own_id(
    tmp_path: Path, path: str, session: str, prefix: str
) -> None:
    if path == "a/v1" and prefix == "/{}":
        pytest.skip("without /v1 the address of a/v1 is that of a")
    async with serving(tmp_path, always()) as server:
        response = await turn(server, prefix.format(path) + "/chat/completions")
        assert response.status_code == 200, response.text
        assert await sessions(server) == [session]


@pytest.mark.parametrize(
    "word",
    [
        *("rl", "engine", "mailbox", "trajectories", "ui", "health", "ready", "metrics", "export_trajectories"),
        *("v1", "grant_capacity", "rl/x", "ui/y/z"),
    ],
)
async def test_a_reserved_first_word_is_refused_by_name(tmp_path: Path, word: str) -> None:
    async with serving(tmp_path, always()) as server:
        response = await turn(server, f"/{word}/v1/chat/completions")
        assert response.status_code == 400
        assert "reserved" in response.json()["error"]["message"]
        assert await sessions(server) == []


@pytest.mark.parametrize("path", ["a%20b", "a//b", "a!b", "a%00b", "x" * 201, "é" * 101, "%ff", "😀", "a%5Cb"])
async def test_an_invalid_session_id_is_refused(tmp_path: Path, path: str) -> None:
    async with serving(tmp_path, always()) as server:
        response = await turn(server, f"/{path}/v1/chat/completions")
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == "session_id"
        assert await sessions(server) == []


async def test_v1_without_key_or_hint_is_the_default_session(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for headers in ({}, {"x-api-key": ""}):
            assert (await turn(server, "/v1/chat/completions", headers=headers)).status_code == 200
        assert await sessions(server) == ["default"]
        assert len(await server.tree("default")) == 2


async def test_the_bare_address_serves_the_same_as_v1(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        assert (await turn(server, "/chat/completions")).status_code == 200
        assert (await turn(server, "/chat/completions", headers={"x-session-id": "hinted"})).status_code == 200
        assert (await server.post("/responses", {"model": "m", "input": "hi"})).status_code == 200
        messages = {"model": "m", "max_tokens": 9, "messages": [user("hi")]}
        assert (await server.post("/messages", messages)).status_code == 200
        assert (await server.post("/messages/count_tokens", messages)).json()["input_tokens"] > 0
        [model] = (await server.http.get("/models")).json()["data"]
        assert (await server.http.get(f"/models/{model['id']}")).json()["id"] == model["id"]
        assert sorted(await sessions(server)) == ["default", "hinted"]


async def test_the_bare_address_with_a_key_is_the_session_of_that_key(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        started = (await server.post("/rl/start_session", {"task_id": "t"}, headers=ADMIN)).json()
        key = {"authorization": f"Bearer {started['api_key']}"}
        assert (await turn(server, "/chat/completions", headers=key)).status_code == 200
        assert (await turn(server, "/chat/completions")).status_code == 401
        assert await sessions(server, headers=ADMIN) == [started["session_id"]]


@pytest.mark.parametrize("header", ["x-claude-code-session-id", "session-id", "x-session-id"])
async def test_a_header_hints_at_the_session(tmp_path: Path, header: str) -> None:
    async with serving(tmp_path, always()) as server:
        await turn(server, "/v1/chat/completions", headers={header: "hinted"})
        assert await sessions(server) == ["hinted"]


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"user_id": '{"session_id": "hinted", "device": "d"}'}},
        {"prompt_cache_key": "hinted"},
        {"prompt_cache_key": "hinted", "metadata": {"user_id": "not json"}},
    ],
)
async def test_a_field_hints_at_the_session(tmp_path: Path, body: dict[str, Any]) -> None:
    async with serving(tmp_path, always()) as server:
        assert (await turn(server, "/v1/chat/completions", body=body)).status_code == 200
        assert await sessions(server) == ["hinted"]


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": {"user_id": "[1]"}},
        {"metadata": {"user_id": 5}},
        {"metadata": []},
        {"metadata": {"user_id": '{"session_id": {"a": 1}}'}},
        {"prompt_cache_key": 7},
        {"prompt_cache_key": "rl/x"},
        {"prompt_cache_key": "not an id"},
        {"prompt_cache_key": "x" * 201},
    ],
)
async def test_a_hint_that_is_no_valid_session_id_is_ignored(tmp_path: Path, body: dict[str, Any]) -> None:
    async with serving(tmp_path, always()) as server:
        assert (await turn(server, "/v1/chat/completions", body=body)).status_code == 200
        assert await sessions(server) == ["default"]


async def test_a_session_key_wins_over_a_hint_and_a_path_over_both(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        a = await server.ok("/rl/start_session", {"task_id": "a", "session_id": "a"})
        headers = {"authorization": f"Bearer {a['api_key']}", "x-session-id": "b"}
        await turn(server, "/v1/chat/completions", headers=headers)
        await turn(server, "/c/v1/chat/completions", headers=headers)
        assert await sessions(server) == ["a", "c"]
        assert len(await server.tree("a")) == len(await server.tree("c")) == 1


@pytest.mark.parametrize("session", ["plain", "with~tilde", "a/b~c", "größe", "a:b@c+d"])
@pytest.mark.parametrize("admin_key", [None, "admin"])
async def test_the_base_url_of_a_started_session_works_with_any_key_or_none(
    tmp_path: Path, session: str, admin_key: str | None
) -> None:
    async with serving(tmp_path, always(), admin_key=admin_key) as server:
        started = await server.ok("/rl/start_session", {"task_id": "t", "session_id": session}, headers=ADMIN)
        assert started["base_url"] == started["root_url"] + "/v1"
        for headers in ({}, {"authorization": "Bearer EMPTY"}, {"x-api-key": "anything"}):
            for base in (started["base_url"], started["root_url"]):
                assert (await turn(server, base + "/chat/completions", headers=headers)).status_code == 200
        assert await sessions(server, headers=ADMIN) == [session]
        assert (await server.http.get(started["base_url"] + "/models")).status_code == 200


async def test_require_key_disables_the_capability_path_without_the_sessions_key(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin", require_key=True) as server:
        started = await server.ok("/rl/start_session", {"task_id": "t"}, headers=ADMIN)
        url = started["base_url"] + "/chat/completions"
        for headers in ({}, {"x-api-key": "other"}):
            refused = await turn(server, url, headers=headers)
            assert refused.status_code == 401
            assert "send its api_key, which --require-key asks for" in refused.text
        assert (await turn(server, url, headers={"x-api-key": started["api_key"]})).status_code == 200


async def test_a_wrong_secret_opens_nothing_on_a_keyed_server(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        started = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "a"}, headers=ADMIN)
        other = await server.ok("/rl/start_session", {"task_id": "t", "session_id": "b"}, headers=ADMIN)
        secret = other["root_url"].rpartition("~")[2]
        for path in (f"a~{secret}", "a~", "a~x", "a", "unknown", f"~{secret}"):
            response = await turn(server, f"/{path}/v1/chat/completions")
            assert response.status_code == 401, (path, response.text)
        assert (await turn(server, f"/b~{secret}/v1/chat/completions")).status_code == 200
        assert await server.http.get("/rl/sessions/a", headers=ADMIN)
        assert started["session_id"] == "a"


@pytest.mark.parametrize("key", ["api_key", "control_key"])
@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
@pytest.mark.parametrize("admin_key", [None, "admin"])
async def test_v1_with_a_sessions_key_is_that_session(
    tmp_path: Path, admin_key: str | None, header: str, key: str
) -> None:
    async with serving(tmp_path, always(), admin_key=admin_key) as server:
        ids = []
        for _ in range(2):
            started = await server.ok("/rl/start_session", {"task_id": "t"}, headers=ADMIN)
            value = started[key] if header == "x-api-key" else f"Bearer {started[key]}"
            for path in ("/v1/chat/completions", f"/{started['session_id']}/v1/chat/completions"):
                assert (await turn(server, path, headers={header: value})).status_code == 200
            ids.append(started["session_id"])
        assert ids == ["t-0", "t-1"]
        for session in ids:
            tree = (await server.http.get(f"/rl/sessions/{session}", headers=ADMIN)).json()["interactions"]
            assert len(tree) == 2


async def test_on_a_keyed_server_an_unknown_session_is_not_created(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        for headers in ({}, {"x-api-key": "x"}, {"x-session-id": "s"}):
            for path in ("/v1", "/new/v1", "/new"):
                response = await turn(server, f"{path}/chat/completions", headers=headers)
                assert response.status_code == 401
        assert (await turn(server, "/new/v1/chat/completions", headers=ADMIN)).status_code == 404
        assert (await turn(server, "/v1/chat/completions", headers=ADMIN)).status_code == 401
        assert await sessions(server, headers=ADMIN) == []


async def test_base_url_comes_from_the_host_header_or_the_public_url(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), allowed_hosts="proxy.test") as server:
        headers = {"host": "proxy.test:9000", "x-forwarded-host": "evil.test", "x-forwarded-proto": "https"}
        started = await server.ok("/rl/start_session", {"task_id": "t"}, headers=headers)
        assert started["base_url"].startswith("http://proxy.test:9000/t-0~")
    (tmp_path / "public").mkdir()
    async with serving(tmp_path / "public", always(), public_url="https://rl.example/base/") as server:
        started = await server.ok("/rl/start_session", {"task_id": "t"}, headers={"host": "localhost"})
        assert started["root_url"].startswith("https://rl.example/base/t-0~")


async def test_sessions_do_not_see_each_other(tmp_path: Path) -> None:
    async with serving(tmp_path, always("same")) as server:
        answer = await server.answer([user("hi")], "a")
        await server.answer([user("hi"), answer, user("more")], "b")
        await server.answer([user("hi"), answer, user("more")], "a")
        assert [node["reason"] for node in await server.tree("a")] == ["first", "continued"]
        assert [node["reason"] for node in await server.tree("b")] == ["first"]
        node = (await server.tree("a"))[0]["id"]
        for path in ("/b/rl/set_reward", "/b/rl/end_session"):
            response = await server.post(path, {"reward": 1.0, "interaction_id": node})
            assert response.status_code == 404
        assert (await server.tree("a"))[0]["reward"] is None


async def test_a_started_session_id_is_checked_and_unique(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for session in ("v1", "rl/x", "a b", "", "x" * 201, "a/", "/a"):
            response = await server.post("/rl/start_session", {"session_id": session})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "session_id"), session
        await server.ok("/rl/start_session", {"session_id": "a"})
        again = await server.post("/rl/start_session", {"session_id": "a"})
        assert (again.status_code, again.json()["error"]["param"]) == (400, "session_id")


async def test_numbered_ids_skip_those_in_use(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await server.ok("/rl/start_session", {"session_id": "t-1"})
        ids = [(await server.ok("/rl/start_session", {"task_id": "t"}))["session_id"] for _ in range(3)]
        assert ids == ["t-0", "t-2", "t-3"]


async def test_granted_capacity_is_counted(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        assert await server.ok("/grant_capacity", {}) == {"capacity": 1}
        assert await server.ok("/grant_capacity", {"n": 3}) == {"capacity": 4}
        assert (await server.post("/grant_capacity", {"n": 0})).status_code == 400
