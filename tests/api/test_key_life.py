"""Keys expire, are rotated, and stop at once; forwarded addresses are accepted only from trusted proxies."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from proxy.settings import Settings
from tests.databases import execute
from tests.support import Server, says, serving, user
from tokengrove.errors import ConfigurationError

ADMIN = "old-admin,new-admin"
TURN = {"model": "m", "messages": [user("hi")]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def started(server: Server, **body: Any) -> Any:
    return await server.ok("/rl/start_session", {"task_id": "t", **body}, headers=bearer("new-admin"))


async def speak(server: Server, keys: Any) -> list[int]:
    """The statuses that the agent's key, the path secret and the control key get."""
    path = keys["base_url"].removeprefix("http://t") + "/chat/completions"
    asked = [("/v1/chat/completions", keys["api_key"]), (path, "DUMMY"), ("/v1/chat/completions", keys["control_key"])]
    return [(await server.post(path, TURN, headers=bearer(key))).status_code for path, key in asked]


async def test_keys_work_until_they_expire_and_again_after_a_rotation(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*"abcdefgh"), admin_key=ADMIN, database_url=database_url) as server:
        keys = await started(server, key_lifetime_s=3600)
        assert keys["keys_expire_at"] == pytest.approx(time.time() + 3600, abs=60)
        assert await speak(server, keys) == [200, 200, 200]
    execute(database_url, "UPDATE sessions SET keys_expire_at = 1.0")
    async with serving(tmp_path, says(*"abcdefgh"), admin_key=ADMIN, database_url=database_url) as server:
        assert await speak(server, keys) == [401, 401, 401]
        ended = await server.post("/t-0/rl/end_session", {}, headers=bearer(keys["control_key"]))
        assert ended.status_code == 401
        assert "expired" in ended.json()["error"]["message"]
        assert (await server.post("/t-0/v1/chat/completions", TURN, headers=bearer("new-admin"))).status_code == 200
        new = await server.ok("/t-0/rl/rotate_keys", {"key_lifetime_s": 60}, headers=bearer("old-admin"))
        assert await speak(server, new) == [200, 200, 200]


async def test_the_servers_key_lifetime_is_the_default(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN, key_lifetime_s=100.0) as server:
        assert (await started(server))["keys_expire_at"] == pytest.approx(time.time() + 100, abs=60)
        assert (await started(server, key_lifetime_s=5000))["keys_expire_at"] > time.time() + 4000
        refused = await server.post(
            "/rl/start_session", {"task_id": "t", "key_lifetime_s": 0}, headers=bearer("new-admin")
        )
        assert refused.json()["error"]["param"] == "key_lifetime_s"


async def test_rotated_keys_stop_at_once_and_new_ones_work(tmp_path: Path, database_url: str) -> None:
    async with serving(tmp_path, says(*"abcdefghij"), admin_key=ADMIN, database_url=database_url) as server:
        old = await started(server)
        assert await speak(server, old) == [200, 200, 200]
        new = await server.ok("/rl/rotate_keys", {}, headers=bearer(old["control_key"]))
        assert await speak(server, old) == [401, 401, 401]
        assert await speak(server, new) == [200, 200, 200]
        assert (await server.ok("/rl/end_session", {}, headers=bearer(new["control_key"])))["interaction_count"] == 6


async def test_only_the_named_keys_are_rotated(tmp_path: Path) -> None:
    async with serving(tmp_path, says(*"abcdef"), admin_key=ADMIN) as server:
        old = await started(server)
        new = await server.ok("/rl/rotate_keys", {"keys": ["agent"]}, headers=bearer(old["control_key"]))
        assert (new["control_key"], new["root_url"]) == (None, "http://t/t-0")
        assert await speak(server, old) == [401, 200, 200]
        assert (await server.post("/v1/chat/completions", TURN, headers=bearer(new["api_key"]))).status_code == 200
        refused = await server.post("/rl/rotate_keys", {"keys": ["all"]}, headers=bearer(old["control_key"]))
        assert refused.json()["error"]["param"] == "keys"


@pytest.mark.parametrize("rewards_by", ["control", "session"])
async def test_an_agent_cannot_rotate_keys(tmp_path: Path, rewards_by: str) -> None:
    async with serving(tmp_path, says(), admin_key=ADMIN, rewards_by=rewards_by) as server:
        keys = await started(server)
        assert (await server.post("/rl/rotate_keys", {}, headers=bearer(keys["api_key"]))).status_code == 403
        path = keys["root_url"].removeprefix("http://t") + "/rl/rotate_keys"
        assert (await server.post(path, {})).status_code in (401, 403)


@pytest.mark.parametrize("key", ["", " ", "a,", "a, b", "\t"])
def test_a_blank_admin_key_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="--admin-key"):
        Settings(admin_key=key)


FORWARDED = {"x-forwarded-proto": "https", "x-forwarded-host": "grove.example", "x-forwarded-prefix": "/rollouts"}


@pytest.mark.parametrize(
    ("settings", "headers", "root"),
    [
        ({}, FORWARDED, "http://t"),
        ({"forwarded_allow_ips": "10.0.0.0/8"}, FORWARDED, "http://t"),
        ({"forwarded_allow_ips": "127.0.0.1"}, FORWARDED, "https://grove.example/rollouts"),
        ({"forwarded_allow_ips": "10.1.1.1, 127.0.0.0/8"}, FORWARDED, "https://grove.example/rollouts"),
        ({"forwarded_allow_ips": "*"}, FORWARDED, "https://grove.example/rollouts"),
        ({"forwarded_allow_ips": "*"}, {"x-forwarded-proto": "https, http"}, "https://t"),
        ({"forwarded_allow_ips": "*"}, {**FORWARDED, "x-forwarded-host": "evil/path"}, "https://t/rollouts"),
        ({"forwarded_allow_ips": "*"}, {**FORWARDED, "x-forwarded-prefix": "//evil"}, "https://grove.example"),
        ({"forwarded_allow_ips": "*"}, {"x-forwarded-proto": "javascript"}, "http://t"),
        ({"forwarded_allow_ips": "*", "public_url": "https://p/x/"}, FORWARDED, "https://p/x"),
    ],
)
async def test_forwarded_headers_count_only_from_a_trusted_proxy(
    tmp_path: Path, settings: dict[str, str], headers: dict[str, str], root: str
) -> None:
    async with serving(tmp_path, says(), **settings) as server:
        keys = await server.ok("/rl/start_session", {"task_id": "t"}, headers=headers)
        assert keys["root_url"].startswith(f"{root}/t-0~")
        assert keys["base_url"] == keys["root_url"] + "/v1"


def test_an_invalid_proxy_address_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="'nginx'"):
        Settings(forwarded_allow_ips="10.0.0.1,nginx")
