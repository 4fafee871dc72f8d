"""Turns over a vLLM server record its masks and experts, token by token, also of replies that end early."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.settings import Settings
from proxy.side_columns.columns import EXPERTS, KEPT, KEPT_LOGPROBS
from tests.engines.wire import LiveWire, experts_at, mask_of
from tests.support import JSON, Server, default_url, tiny_renderer, user
from tokengrove.errors import ConfigurationError

COLUMNS = (KEPT, KEPT_LOGPROBS, EXPERTS)


@contextlib.asynccontextmanager
async def served(folder: Path, *replay: str, **wire_is: Any) -> AsyncIterator[Server]:
    live = LiveWire("vllm", delay_s=0.002)
    await live.start()
    for name, value in wire_is.items():
        setattr(live.wire, name, value)
    settings = Settings(engine=live.url, database_url=default_url(folder), migrate=True, replay=replay)
    app = build_app(settings, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON)
    try:
        async with app.router.lifespan_context(app), client as http:
            yield Server(app, http, app.state.engine)
    finally:
        await live.kill()


async def test_each_turn_records_the_rows_of_its_new_tokens(tmp_path: Path) -> None:
    async with served(tmp_path, "kept", "experts", masks=True, experts=True) as server:
        said = [user("hi")]
        for _ in range(2):
            said += [await server.answer(said, max_tokens=9, top_k=5), user("more")]
        turns = await server.tree()
        assert [turn["notes"]["replay"] for turn in turns] == [dict.fromkeys(COLUMNS, 0)] * 2
        (sample,) = await server.export(replay=["kept", "experts"])
        ids, trained = sample["input_ids"], [bool(each) for each in sample["loss_mask"]]
        *experts, last = sample["routed_experts"]
        assert experts == [experts_at(at) for at in range(len(ids) - 1)]
        assert last == [[255] * 2] * 3  # no forward pass has taken in the last token
        assert sample["kept_counts"] == [3 * each for each in trained]
        kept = [each for token, at in zip(ids, trained, strict=True) if at for each in sorted(mask_of(token))]
        assert sample["kept_ids"] == kept and sum(trained) == 18
        logprobs = [min(each, 0.0) if at else None for each, at in zip(sample["logprobs"], trained, strict=True)]
        assert sample["kept_logprobs"] == logprobs


async def test_a_reply_that_a_stop_string_ends_lacks_no_rows(tmp_path: Path) -> None:
    async with served(tmp_path, "experts", experts=True) as server:
        text = (await server.answer([user("hi")], "whole", max_tokens=40, top_k=5))["content"]
        for stream in (False, True):
            session, stop = f"stopped-{stream}", text[len(text) // 2 :][:4]
            body = {"model": "m", "messages": [user("hi")], "max_tokens": 4000, "stop": stop, "stream": stream}
            assert (await server.post(f"/{session}/v1/chat/completions", body)).status_code == 200
            (turn,) = await server.tree(session)
            assert turn["finish_reason"] == "stop_string" and turn["notes"]["replay"] == {EXPERTS: 0}
            (sample,) = await server.export(session, replay=["experts"])
            assert sample["routed_experts"][:-1] == [experts_at(at) for at in range(len(sample["input_ids"]) - 1)]


@pytest.mark.parametrize(
    ("replay", "flag"), [("kept", "--return-sampling-mask"), ("experts", "--enable-return-routed-experts")]
)
async def test_a_server_without_the_flag_is_refused_at_the_start(tmp_path: Path, replay: str, flag: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--replay {replay}: .*{flag}"):
        async with served(tmp_path, replay):
            pass


async def test_experts_of_a_dense_model_cost_nothing_and_are_no_error(tmp_path: Path) -> None:
    async with served(tmp_path, "experts", moe=False) as server:
        await server.chat([user("hi")], max_tokens=9)
        (turn,) = await server.tree()
        assert "replay" not in turn["notes"]


async def test_an_agent_without_top_k_is_told_that_the_server_needs_one(tmp_path: Path) -> None:
    async with served(tmp_path, "kept", masks=True) as server:
        body = {"model": "m", "messages": [user("hi")], "max_tokens": 9}
        refused = await server.post("/s/v1/chat/completions", body)
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert error["param"] == "top_k" and "without top_k" in error["message"]
