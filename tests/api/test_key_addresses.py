"""`/~KEY/...` is the session that a key was issued for, as `Authorization: Bearer KEY` without a path is."""

from __future__ import annotations

import contextlib
import json
import logging
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from proxy.engine.scripted.scripts import Reply, Script
from tests.support import Server, sampled, serving, user

ADMIN = {"authorization": "Bearer admin"}
KEY = "slot-7.of_the!first~worker"
HI = {"model": "m", "messages": [user("hi")]}


def always() -> Script:
    reply = Reply(sampled("ok"), chunk=64)
    return lambda request: reply


async def start(server: Server, session: str, key: str = KEY, **more: Any) -> Any:
    body = {"session_id": session, "api_key": key, **more}
    return await server.ok("/rl/start_session", body, headers=ADMIN)


async def speak(
    server: Server, address: str, key: str | None = None, path: str = "/v1/chat/completions"
) -> httpx.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return await server.post(f"/~{quote(address, safe='')}{path}", {**HI, "max_tokens": 4}, headers=headers)


async def turns(server: Server, session: str) -> list[Any]:
    return (await server.http.get(f"/rl/sessions/{session}", headers=ADMIN)).json()["interactions"]  # type: ignore[no-any-return]


async def sessions(server: Server) -> list[str]:
    listed = (await server.http.get("/rl/sessions", headers=ADMIN)).json()["sessions"]
    return [entry["session_id"] for entry in listed]


def refusal(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


@pytest.mark.parametrize("admin_key", [None, "admin"], ids=["open", "keyed"])
async def test_an_address_with_a_key_is_its_session_whatever_key_comes_beside_it(
    tmp_path: Path, admin_key: str | None
) -> None:
    async with serving(tmp_path, always(), admin_key=admin_key) as server:
        await start(server, "s")
        other = await start(server, "other", "the-key-of-another-session")
        for key in (None, "7", KEY, other["api_key"], other["control_key"], "admin"):
            reply = await speak(server, KEY, key)
            assert reply.status_code == 200, reply.text
            assert reply.headers.get("x-tokengrove-session") == ("s" if admin_key is None else None)
        for path in ("/v1/messages", "/chat/completions", "/v1/messages/count_tokens", "/v1/tokenize"):
            assert (await speak(server, KEY, "7", path)).status_code == 200, path
        generated = await server.post(f"/~{KEY}/v1/generate", {"input_ids": [1, 2]})
        assert generated.status_code == 200
        assert len(await turns(server, "s")) == 9 and await turns(server, "other") == []
        assert await sessions(server) == ["s", "other"]


async def test_a_small_number_is_key_and_address_on_an_open_server(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        await start(server, "s", "7")
        assert (await speak(server, "7", "7")).status_code == 200
        await server.ok("/v1/chat/completions", HI, headers={"authorization": "Bearer 7"})
        assert len(await turns(server, "s")) == 2 and await sessions(server) == ["s"]


@pytest.mark.parametrize("admin_key", [None, "admin"], ids=["open", "keyed"])
async def test_a_late_request_is_refused_until_the_key_is_chosen_again(
    tmp_path: Path, database_url: str, admin_key: str | None
) -> None:
    how: dict[str, Any] = {"admin_key": admin_key, "database_url": database_url, "rewards_by": "session"}
    async with serving(tmp_path, always(), **how) as server:
        for name in ("one", "two"):
            await start(server, name)
            assert (await speak(server, KEY, "7")).status_code == 200
            await server.ok(f"/~{KEY}/rl/end_session", {"reward": 1.0}, headers={"authorization": "Bearer 7"})
            assert refusal(await speak(server, KEY, "7")) == (403, "session_closed")
        await start(server, "three")
    async with contextlib.AsyncExitStack() as stack:
        server = other = await stack.enter_async_context(serving(tmp_path, always(), **how))
        if not database_url.startswith("sqlite"):
            other = await stack.enter_async_context(serving(tmp_path, always(), **how))
        assert (await speak(other, KEY, "7")).status_code == 200
        await server.ok(f"/~{KEY}/rl/set_reward", {"reward": 2.0})
        await server.ok("/three/rl/end_session", {}, headers=ADMIN)
        assert refusal(await speak(other, KEY)) == (403, "session_closed")
        await start(other, "four")
        assert (await speak(server, KEY)).status_code == 200
        # A deleted session leaves its key to the ended one before, and to whoever chooses it again.
        await server.http.request("DELETE", "/rl/sessions/four", headers=ADMIN)
        assert refusal(await speak(other, KEY)) == (403, "session_closed")
        await start(server, "five")
        assert (await speak(other, KEY)).status_code == 200
        assert [len(await turns(server, name)) for name in ("one", "two", "three", "five")] == [1, 1, 1, 1]
        assert [turn["reward"] for turn in await turns(server, "three")] == [2.0]
        assert await sessions(server) == ["one", "two", "three", "five"]


async def test_an_expired_session_is_closed_to_its_address(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), session_idle_s=0.05) as server:
        await start(server, "s")
        while (await server.http.get("/rl/sessions/s")).json()["status"] == "active":
            await server.http.get("/health")
        assert refusal(await speak(server, KEY)) == (403, "session_closed")
        assert await sessions(server) == ["s"]


@pytest.mark.parametrize("admin_key", [None, "admin"], ids=["open", "keyed"])
async def test_a_key_that_no_session_has_begins_none(tmp_path: Path, admin_key: str | None) -> None:
    async with serving(tmp_path, always(), admin_key=admin_key) as server:
        started = await start(server, "s")
        secret = started["root_url"].rpartition("~")[2]
        near = (KEY[:-1], f"{KEY}x", f"@{KEY}", f"{KEY}/x", f"x/{KEY}")
        for wrong in ("", "unknown", "s", secret, *near, "a/../b", "%"):
            for path in ("/v1/chat/completions", "/v1/messages", "/rl/set_reward", "/rl/end_session"):
                refused = await speak(server, wrong, "7", path)
                assert refused.status_code == 401, (wrong, path, refused.text)
                assert not wrong or wrong not in refused.json()["error"]["message"].split()
        for secret in (started["control_key"], *(["admin"] if admin_key else [])):
            refused = await speak(server, secret)
            assert refusal(refused) == (401, "invalid_api_key") and "api_key of a session only" in refused.text
        assert await sessions(server) == ["s"] and await turns(server, "s") == []


async def test_an_agent_is_named_after_the_key_of_its_address(tmp_path: Path) -> None:
    names = ["coder", "a~b", "@", "a@b", "a/b", "", f"~{'x' * 22}"]
    async with serving(tmp_path, always(), admin_key="admin") as server:
        await start(server, "s")
        for name in names:
            assert (await speak(server, f"{KEY}@{name}", "7")).status_code == 200
        shown = [await server.http.get(f"/rl/sessions/s/interactions/{n}", headers=ADMIN) for n in range(len(names))]
        assert [each.json()["agent"] for each in shown] == [name or None for name in names]


@pytest.mark.parametrize(
    "key", ["!\"#$%&'()*+,-.:;<=>?[\\]^_`{|}~", "..", "%2e", "a?b=c#d", "~~", "%", "0~" + "x" * 22]
)
async def test_any_key_that_may_be_chosen_can_stand_in_an_address(tmp_path: Path, key: str) -> None:
    async with serving(tmp_path, always()) as server:
        await start(server, "s", key)
        assert (await speak(server, key, "7")).status_code == 200
        assert (await speak(server, f"{key}@agent", "7")).status_code == 200
        assert len(await turns(server, "s")) == 2 and await sessions(server) == ["s"]


async def test_require_key_asks_for_a_key_of_the_session_beside_its_address(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin", require_key=True, rewards_by="session") as server:
        started = await start(server, "s")
        other = await start(server, "other", "the-key-of-another-session")
        for key in (None, "7", other["api_key"], other["control_key"]):
            for path in ("/v1/chat/completions", "/rl/set_reward", "/rl/end_session"):
                refused = await speak(server, KEY, key, path)
                assert refusal(refused) == (401, "invalid_api_key") and "--require-key" in refused.text
        for key in (KEY, started["control_key"], "admin"):
            assert (await speak(server, KEY, key)).status_code == 200
        await server.ok(f"/~{KEY}/rl/set_reward", {"reward": 1}, headers={"authorization": f"Bearer {KEY}"})
        assert len(await turns(server, "s")) == 3


async def test_an_address_rewards_and_ends_as_its_key_may(tmp_path: Path) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        started = await start(server, "s")
        await speak(server, KEY)
        paths = ("/rl/set_reward", "/rl/end_session", "/rl/rotate_keys")
        for path in paths:
            refused = await server.post(f"/~{KEY}{path}", {}, headers={"authorization": "Bearer 7"})
            assert refusal(refused) == (403, "forbidden"), path
        control = {"authorization": f"Bearer {started['control_key']}"}
        await server.ok(f"/~{KEY}/rl/set_reward", {"reward": 1}, headers=control)
        rotated = await server.ok(f"/~{KEY}/rl/rotate_keys", {"keys": ["agent"]}, headers=control)
        refused = await speak(server, KEY)
        assert refusal(refused) == (401, "invalid_api_key") and "was replaced" in refused.text
        assert (await speak(server, rotated["api_key"])).status_code == 200


async def test_keys_that_have_expired_open_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, always(), admin_key="admin") as server:
        await start(server, "s", key_lifetime_s=60)
        monkeypatch.setattr("proxy.sessions.access.time.time", lambda: 1e11)
        refused = await speak(server, KEY)
        assert refusal(refused) == (401, "invalid_api_key") and "have expired" in refused.text


async def test_no_session_gets_an_id_that_begins_like_a_key_in_an_address(tmp_path: Path) -> None:
    async with serving(tmp_path, always()) as server:
        for name in ("session_id", "task_id"):
            refused = await server.post("/rl/start_session", {name: "~7"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
        await server.ok("/v1/chat/completions", HI, headers={"x-session-id": "~7"})
        await server.ok("/a~7/v1/chat/completions", HI)
        assert await sessions(server) == ["default", "a~7"]


async def test_no_line_error_or_reply_repeats_the_key_of_an_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    key = "sesame!open"
    async with serving(tmp_path, always(), log_level="debug") as server:
        await start(server, "s", key)
        await speak(server, key)
        said = [
            await speak(server, key, None, path)
            for path in ("/v1/nothing", "/rl/nothing", "/nothing", "/v1/chat/completions/x")
        ]
        said += [await server.post(f"/~{key}/rl/end_session", {})]
        said += [await speak(server, key), await speak(server, f"{key}@coder"), await speak(server, f"a/{key}")]
        said += [await speak(server, f"a/{key}", None, "/nothing"), await server.http.get(f"/~{key}/v1/responses")]
        assert [each.status_code for each in said] == [404, 404, 404, 404, 200, 403, 403, 401, 404, 405]
        exported = await server.ok("/trajectories/export", {"session_ids": ["s"]})
    everything = [each.text + str(each.headers) for each in said]
    everything += [f"{record.getMessage()} {record.args}" for record in caplog.records if record.name != "httpx"]
    assert not [each for each in everything if "sesame" in each]
    assert "sesame" not in json.dumps(exported)
