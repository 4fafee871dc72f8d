"""Adapters over HTTP: sessions on several versions at once, each token recomputed by PEFT under its own version."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.tiny.model import builtin_model_folder
from proxy.settings import Settings
from tests.adapters import adapter_logprobs, write_adapter
from tests.support import Server, default_url, user

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.engines
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {seed: write_adapter(builtin_model_folder(), folder / str(seed), seed) for seed in (1, 2, 3, 4)}


@asynccontextmanager
async def serving_adapters(folder: Path, *, lora: bool = True, **settings: Any) -> AsyncIterator[Server]:
    """A server of the built-in model whose only route serves adapters; only them, if `lora`."""
    models = json.dumps({"policy": {"lora": lora}})
    configured = Settings(
        database_url=default_url(folder), migrate=True, engine="transformers", models=models, **settings
    )
    app = build_app(configured)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", timeout=120)
    async with app.router.lifespan_context(app), client as http:
        yield Server(app, http, app.state.engine)


async def say(server: Server, session: str, messages: list[Any], model: str = "policy") -> httpx.Response:
    body = {"model": model, "messages": messages, "max_tokens": 12}
    return await server.post(f"/{session}/v1/chat/completions", body)


async def turns(server: Server, session: str) -> list[Any]:
    return (await server.http.get(f"/rl/sessions/{session}")).json()["interactions"]


async def check_tokens(server: Server, session: str, adapters: dict[int, Path]) -> list[int]:
    """Check the logprobs of a session against PEFT's; return the version of each turn."""
    versions = []
    for number, turn in enumerate(await turns(server, session)):
        shown = (await server.http.get(f"/rl/sessions/{session}/interactions/{number}?include=ids,logprobs")).json()
        version = turn["notes"]["adapter"]
        assert turn["versions"] == [[len(shown["output_ids"]), version]]
        wanted = adapter_logprobs(builtin_model_folder(), adapters[version], shown["prompt_ids"], shown["output_ids"])
        assert shown["logprobs"] == pytest.approx(wanted, abs=TOLERANCE)
        versions.append(version)
    return versions


async def test_each_token_is_of_the_version_of_its_session_while_others_are_published(
    tmp_path: Path, adapters: dict[int, Path]
) -> None:
    async with serving_adapters(tmp_path) as server:
        none = await say(server, "s0", [user("hello")])
        assert (none.status_code, none.json()["error"]["code"]) == (503, "engine_unavailable"), "never the base model"

        async def play(version: int) -> None:
            first = (await say(server, f"s{version}", [user("hello")])).json()["choices"][0]["message"]
            talk = [user("hello"), first, user("again")]
            replies = await asyncio.gather(*(say(server, f"s{version}", talk) for _ in range(2)))
            assert [reply.status_code for reply in replies] == [200, 200]

        playing = []
        for version in (1, 2, 3):
            published = await server.ok("/engine/adapters", {"path": str(adapters[version])})
            assert published["version"] == version
            assert (await say(server, f"s{version}", [user("begin")])).status_code == 200
            playing.append(asyncio.create_task(play(version)))
        await server.ok("/engine/adapters", {"path": str(adapters[4])})
        await asyncio.gather(*playing)
        for version in (1, 2, 3):
            assert set(await check_tokens(server, f"s{version}", adapters)) == {version}
        assert (await say(server, "s9", [user("hello")])).status_code == 200
        assert await check_tokens(server, "s9", adapters) == [4]
        unknown = await say(server, "s8", [user("hello")], "policy@9")
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")
        pinned = await say(server, "s7", [user("hello")], "policy@2")
        assert (pinned.status_code, pinned.json()["model"]) == (200, "policy@2")
        assert await check_tokens(server, "s7", adapters) == [2]


async def test_a_session_that_follows_gets_the_newest_version_at_each_turn(
    tmp_path: Path, adapters: dict[int, Path]
) -> None:
    async with serving_adapters(tmp_path) as server:
        await server.ok("/rl/start_session", {"session_id": "s", "adapter_pinning": "follow"})
        talk = [user("hello")]
        for version in (1, 2):
            await server.ok("/engine/adapters", {"path": str(adapters[version])})
            talk += [(await say(server, "s", talk)).json()["choices"][0]["message"], user("again")]
        assert await check_tokens(server, "s", adapters) == [1, 2]
        shown = (await server.http.get("/engine/adapters")).json()["adapters"][0]
        assert [live["version"] for live in shown["live"]] == [2], "an unused version is unloaded"


async def test_after_a_restart_a_session_never_changes_its_version_in_silence(
    tmp_path: Path, adapters: dict[int, Path]
) -> None:
    async with serving_adapters(tmp_path) as server:
        await server.ok("/engine/adapters", {"path": str(adapters[1])})
        assert (await say(server, "s", [user("hello")])).status_code == 200
    async with serving_adapters(tmp_path, lora=False) as server:
        refused = await say(server, "s", [user("no adapter is live")])
        assert (refused.status_code, "began with version 1" in refused.text) == (404, True), "never the base model"
    async with serving_adapters(tmp_path, lora=False, adapter_pinning="follow") as server:
        assert (await say(server, "s", [user("no adapter is live")])).status_code == 503, "never the base model"
    async with serving_adapters(tmp_path) as server:
        await server.ok("/engine/adapters", {"path": str(adapters[2])})
        refused = await say(server, "s", [user("another adapter has the number 1")])
        assert (refused.status_code, "numbered another adapter 1" in refused.text) == (404, True)
        await server.ok("/engine/adapters", {"path": str(adapters[2]), "version": 2})
        refused = await say(server, "s", [user("other")])
        assert refused.status_code == 404
        assert "began with version 1" in refused.json()["error"]["message"]
        assert (await say(server, "t", [user("hello")])).status_code == 200
        assert [turn["notes"]["adapter"] for turn in await turns(server, "t")] == [2]
