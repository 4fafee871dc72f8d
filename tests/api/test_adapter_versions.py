"""`/engine/adapters` over HTTP, with the scripted engine: publications, refusals, folders, what it shows."""

from __future__ import annotations

import asyncio
import base64
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from proxy.engine.adapters import Adapters
from proxy.engine.interface import Capability
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.settings import Settings
from proxy.telemetry.log import AUDIT
from tests.logs import fields_of
from tests.support import Server, says, serving, until, user
from tokengrove.client import AsyncClient
from tokengrove.errors import ConfigurationError, EngineIncapable, InvalidRequest, NotFound
from tokengrove.options.start import AdapterPinning

CONFIG = {"peft_type": "LORA", "r": 1}
TENSORS = save({"a.lora_A.weight": np.ones((1, 2), np.float32)})
BYTES = {"config": CONFIG, "tensors": base64.b64encode(TENSORS).decode()}
MODELS = '{"policy": {"lora": true}, "other": {"kind": "external", "url": "http://127.0.0.1:9/v1"}}'


def adapters_of(server: Server) -> Adapters:
    return server.app.state.adapters


def found(folder: Path, pattern: str) -> list[Path]:
    return list(folder.glob(pattern))


async def show(server: Server) -> Any:
    return (await server.http.get("/engine/adapters")).json()["adapters"]


async def refused(server: Server, method: str, body: Any, status: int, param: str | None) -> str:
    response = await server.http.request(method, "/engine/adapters", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (status, param), response.text
    return str(error["message"])


async def test_an_adapter_is_published_from_a_folder_and_shown(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        assert (await server.http.get("/engine")).json()["adapters"] is None
        assert await show(server) == [{"name": "", "newest": None, "live": [], "waiting_for": None}]
        answer = await server.ok("/engine/adapters", {"path": "/adapters/1", "name": "any"})
        (live,) = answer["live"]
        assert (answer["name"], answer["version"], live["path"]) == ("", 1, "/adapters/1")
        assert {key: live[key] for key in ("version", "sessions", "running")} == {
            "version": 1,
            "sessions": 0,
            "running": 0,
        }
        assert (await server.http.get("/engine")).json()["adapters"] == {
            "newest": 1,
            "live": [live],
            "waiting_for": None,
        }
        assert server.engine.adapters[1].path == "/adapters/1"


async def test_an_adapter_is_published_from_bytes_whose_folder_lives_as_long(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        await server.ok("/engine/adapters", BYTES)
        source = server.engine.adapters[1]
        first = Path(source.path)
        assert (source.config, source.tensors) == (CONFIG, TENSORS)
        assert (first / "adapter_model.safetensors").read_bytes() == TENSORS
        again = await server.ok("/engine/adapters", {**BYTES, "version": 1})
        assert (again["version"], len(list(first.parent.iterdir()))) == (1, 1)
        await server.ok("/engine/adapters", BYTES)
        await until(lambda: 1 not in server.engine.adapters)
        second = Path(server.engine.adapters[2].path)
        assert found(first.parent, "*") == [second]
    assert not second.parent.exists()


WRONG: list[tuple[Any, str]] = [
    ({}, "path"),
    ({"path": ""}, "path"),
    ({"path": 5}, "path"),
    ({"path": "a\0"}, "path"),
    ({"path": "a", "config": CONFIG}, "config"),
    ({"path": "a", "tensors": "AAAA"}, "tensors"),
    ({"config": CONFIG}, "tensors"),
    ({"tensors": "AAAA"}, "config"),
    ({**BYTES, "config": []}, "config"),
    ({**BYTES, "config": {}}, "config.peft_type"),
    ({**BYTES, "config": {"peft_type": "IA3"}}, "config.peft_type"),
    ({**BYTES, "tensors": 5}, "tensors"),
    ({**BYTES, "tensors": "no base64"}, "tensors"),
    ({**BYTES, "tensors": "\u00e4"}, "tensors"),
    ({**BYTES, "tensors": "AAAA"}, "tensors"),
    ({"path": "a", "version": 0}, "version"),
    ({"path": "a", "version": "2"}, "version"),
    ({"path": "a", "version": True}, "version"),
    ({"path": "a", "version": 1.5}, "version"),
    ({"path": "a", "version": 2**31}, "version"),
    ({"path": "a", "verson": 2}, "verson"),
    ({"path": "a", "name": 3}, "name"),
    ([], "body"),
]


async def test_a_wrong_field_is_named_and_nothing_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    async with serving(tmp_path, says()) as server:
        for body, param in WRONG:
            await refused(server, "POST", body, 400, param)
        for body, param in (({}, "version"), ({"version": "x"}, "version"), ({"versions": 1}, "versions")):
            await refused(server, "DELETE", body, 400, param)
        await refused(server, "DELETE", {"version": 1}, 404, "version")
        assert (await show(server))[0]["newest"] is None
        assert found(tmp_path, "tokengrove-adapters-*/*") == []


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
async def test_only_the_administrator_manages_adapters(tmp_path: Path, method: str) -> None:
    async with serving(tmp_path, says(), admin_key="admin") as server:
        headers = {"authorization": "Bearer admin"}
        mine = await server.ok("/rl/start_session", {"session_id": "s"}, headers=headers)
        for key in ("wrong", mine["api_key"], mine["control_key"]):
            headers = {"authorization": f"Bearer {key}"}
            response = await server.http.request(method, "/engine/adapters", headers=headers, content=b"\xff")
            assert response.status_code == 403


async def test_an_audit_line_names_the_version_and_no_tensors(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, AUDIT)
    async with serving(tmp_path, says()) as server:
        await server.ok("/engine/adapters", {**BYTES, "name": "policy"})
    (line,) = fields_of(caplog, "audit")
    assert (line["action"], line["name"], line["version"]) == ("engine.adapters.publish", "policy", 1)
    assert not {"tensors", "config"} & set(line)


async def test_a_route_of_the_table_is_named_and_an_unknown_one_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), models=MODELS) as server:
        assert [entry["name"] for entry in await show(server)] == ["policy"]
        assert (await server.ok("/engine/adapters", {"path": "a", "name": "policy"}))["name"] == "policy"
        assert (await server.ok("/engine/adapters", {"path": "b"}))["version"] == 2
        for name in ("other", "polciy"):
            told = await refused(server, "POST", {"path": "c", "name": name}, 404, "name")
            assert "none of the policies: policy" in told


async def test_weights_do_not_change_while_versions_count_adapters(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        await server.ok("/engine/update_weights", {"path": "w", "version": 4})
        assert (await server.ok("/engine/adapters", {"path": "a"}))["version"] == 5
        for path in ("update_weights", "begin_weight_update", "start_weight_update"):
            response = await server.post(f"/engine/{path}", {"path": "w"})
            assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_request")
            assert "serves adapters" in response.text
        assert (await server.http.get("/engine")).json()["version"] == 4


async def test_the_end_of_a_session_unpins_it_and_a_waiting_publication_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), max_live_versions=1) as server:
        await server.ok("/engine/adapters", {"path": "a"})
        await server.ok("/rl/start_session", {"session_id": "s"})
        adapters_of(server).end(adapters_of(server).begin("s"))
        waiting = asyncio.create_task(server.ok("/engine/adapters", {"path": "b"}))
        await until(lambda: adapters_of(server).show()["waiting_for"] is not None)
        shown = (await show(server))[0]
        assert shown["waiting_for"] == {"version": 2, "sessions": ["s"], "count": 1, "requests": 0}
        await server.ok("/s/rl/end_session", {})
        assert (await waiting)["version"] == 2


async def test_staleness_counts_adapters(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), max_staleness=0, batch_size=1) as server:
        await server.ok("/rl/start_session", {"session_id": "a"})
        assert (await server.post("/rl/start_session", {"session_id": "b"})).status_code == 429
        await server.ok("/engine/adapters", {"path": "a"})
        await server.ok("/rl/start_session", {"session_id": "b"})
        assert (await server.http.get("/rl/sessions/b")).json()["version"] == 1
        assert (await server.post("/rl/start_session", {"session_id": "c"})).status_code == 429


async def test_a_shutdown_ends_a_publication_that_waits(tmp_path: Path) -> None:
    async with serving(tmp_path, says(), max_live_versions=1) as server:
        await server.ok("/engine/adapters", {"path": "a"})
        adapters_of(server).begin("s")
        waiting = asyncio.create_task(server.post("/engine/adapters", {"path": "b"}))
        await until(lambda: adapters_of(server).show()["waiting_for"] is not None)
    response = await waiting
    assert (response.status_code, "shutting down" in response.text) == (503, True)


async def test_an_engine_without_adapters_answers_501_with_what_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "proxy.engine.scripted.engine.Capability",
        [each for each in Capability if each is not Capability.ADAPTERS],
    )
    async with serving(tmp_path, says()) as server:
        assert "models.md#adapters" in await refused(server, "POST", {"path": "a"}, 501, None)
        assert (await server.http.get("/engine")).json()["adapters"] is None


async def test_the_client_publishes_lists_and_withdraws(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server, AsyncClient(app=server.app) as client:
        assert await client.publish_adapter("/adapters/1") == 1
        assert await client.publish_adapter("/adapters/1", version=1) == 1
        assert await client.publish_adapter(config=CONFIG, tensors=TENSORS, version=7) == 7
        (policy,) = await client.adapters()
        assert (policy["newest"], [entry["version"] for entry in policy["live"]]) == (7, [7])
        assert (await client.engine()).extra["adapters"]["newest"] == 7
        with pytest.raises(InvalidRequest, match="is the newest"):
            await client.withdraw_adapter(7)
        with pytest.raises(NotFound):
            await client.withdraw_adapter(1)
        with pytest.raises(InvalidRequest):
            await client.publish_adapter(version=8)


async def test_a_version_that_stayed_is_withdrawn_once_the_engine_unloads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(self: ScriptedEngine, version: int) -> None:
        raise EngineIncapable("not now")

    async with serving(tmp_path, says()) as server, AsyncClient(app=server.app) as client:
        with monkeypatch.context() as patched:
            patched.setattr(ScriptedEngine, "unload_adapter", fails)
            for path in ("a", "b"):
                await client.publish_adapter(path)
            with pytest.raises(EngineIncapable, match="not now"):
                await client.withdraw_adapter(1)
        assert (await client.withdraw_adapter(1))["newest"] == 2
        assert list(server.engine.adapters) == [2]


async def test_a_session_sets_its_pinning_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, says()) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "adapter_pinning": "follow"})
        record = (await server.app.state.registry.get("s")).record
        assert record.turn_options["adapter_pinning"] == AdapterPinning.FOLLOW
        response = await server.post("/rl/start_session", {"session_id": "t", "adapter_pinning": "newest"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "adapter_pinning")


def test_settings_of_adapters_are_checked() -> None:
    assert (Settings().max_live_versions, Settings().adapter_pinning) == (4, AdapterPinning.SESSION)
    with pytest.raises(ConfigurationError, match="max-live-versions"):
        Settings(max_live_versions=0)


async def test_a_reply_that_cannot_begin_leaves_its_adapter_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: Any) -> Any:
        raise RuntimeError("a bug")

    async with serving(tmp_path, says("one")) as server:
        await server.ok("/engine/adapters", {"path": "/adapters/1"})
        with monkeypatch.context() as patched:
            patched.setattr("proxy.turns.turns.make_turns", fail)
            failed = await server.post("/s/v1/chat/completions", {"model": "m", "messages": [user("a")]})
        assert failed.status_code == 500
        assert [live["running"] for live in (await show(server))[0]["live"]] == [0]
        await server.chat([user("a")])
        assert [live["running"] for live in (await show(server))[0]["live"]] == [0]
