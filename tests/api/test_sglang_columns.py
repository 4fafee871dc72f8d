"""Side columns of SGLang servers in a whole server: each turn asks for the rows that its session lacks."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from proxy.app import build_app
from proxy.engine.tiny.model import builtin_model_folder
from proxy.settings import Settings
from tests.engines.wire import LiveWire
from tests.support import JSON, Server, default_url, tiny_renderer, user
from tokengrove.errors import ConfigurationError

QWEN = {"model_type": "qwen3_moe", "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}


@pytest_asyncio.fixture
async def wire() -> AsyncIterator[Any]:
    live = LiveWire("sglang")
    await live.start()
    yield live
    await live.kill()


def app_of(wire: LiveWire, tmp_path: Path, **settings: Any) -> Any:
    folder = tmp_path / "model"
    shutil.copytree(builtin_model_folder(), folder)
    (folder / "config.json").write_text(json.dumps({**QWEN, "vocab_size": 640}))
    database = {"database_url": default_url(tmp_path), "migrate": True}
    return build_app(
        Settings(engine=wire.url, model=str(folder), **database, **settings),
        renderer=tiny_renderer(),
    )


async def test_each_turn_asks_for_the_experts_of_the_tokens_that_its_session_has_none_of(
    wire: LiveWire, tmp_path: Path
) -> None:
    wire.wire.layers = 3
    app = app_of(wire, tmp_path, replay=("kept", "experts"))
    client = httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://t", headers=JSON)
    async with app.router.lifespan_context(app), client as http:
        server, messages = Server(app, http, app.state.engine), [user("hi")]
        ends = []
        for _ in range(3):
            body = {"model": "m", "max_tokens": 9, "top_k": 20, "messages": messages}
            answer = (await server.post("/s/v1/chat/completions", body)).json()
            messages += [answer["choices"][0]["message"], user("more")]
            ends.append(answer["usage"]["total_tokens"])
            assert "routed_experts" not in json.dumps(answer)
        asked = [each for each in wire.wire.columns if each]
        assert [each["routed_experts_start_len"] for each in asked] == [0, ends[0] - 1, ends[1] - 1]
        assert all(each["return_sampling_mask"] for each in asked)
        session = (await http.get("/rl/sessions/s")).json()
        assert [turn["notes"]["replay"] for turn in session["interactions"]] == [
            {"kept": 0, "kept_logprobs": 0, "routed_experts": 0}
        ] * 3


async def test_a_server_without_its_flag_ends_the_start_with_the_flag(wire: LiveWire, tmp_path: Path) -> None:
    app = app_of(wire, tmp_path, replay=("experts",))
    with pytest.raises(ConfigurationError, match="--enable-return-routed-experts"):
        async with app.router.lifespan_context(app):
            pass
