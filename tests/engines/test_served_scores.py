"""`POST /v1/logprobs`: tokens and recorded turns scored by the policy, its adapters and a frozen model, against forward
passes in float32."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.engine.tiny.model import build_tiny_model, builtin_model_folder
from proxy.settings import Settings
from tests.adapters import adapter_logprobs, write_adapter
from tests.support import Server, default_url, user

pytest.importorskip("torch")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.engines
TOLERANCE = 1e-4
IDS = [n * 37 % 400 + 40 for n in range(120)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference")
    build_tiny_model(folder, seed=5)
    return folder


@asynccontextmanager
async def serving_models(folder: Path, reference: Path) -> AsyncIterator[Server]:
    """A server of the built-in model as policy, and a frozen one."""
    tables = {"policy": {}, "reference": {"kind": "frozen", "engine": "transformers", "model": str(reference)}}
    settings = Settings(
        database_url=default_url(folder), migrate=True, engine="transformers", models=json.dumps(tables)
    )
    app = build_app(settings)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", timeout=120)
    async with app.router.lifespan_context(app), client as http:
        yield Server(app, http, app.state.engine)


def expected(model: Path, ids: Sequence[int], start: int, temperature: float = 1.0, adapter: Path | None = None) -> Any:
    return pytest.approx(adapter_logprobs(model, adapter, ids[:start], ids[start:], temperature), abs=TOLERANCE)


async def test_given_tokens_are_scored_by_each_model(tmp_path: Path, reference: Path) -> None:
    async with serving_models(tmp_path, reference) as server:
        for model, folder in (("policy", builtin_model_folder()), ("reference", reference)):
            one = await server.ok("/v1/logprobs", {"model": model, "input_ids": IDS})
            assert one["model"] == model and len(one["data"]) == 1
            assert one["data"][0]["logprobs"] == expected(folder, IDS, 1)
            body = {"model": model, "input_ids": [IDS, IDS[5:]], "start": 40, "temperature": 0.5, "top_k": 3}
            two = await server.ok("/v1/logprobs", body)
            for row, ids in zip(two["data"], (IDS, IDS[5:]), strict=True):
                assert row["start"] == 40
                assert row["logprobs"] == expected(folder, ids, 40, 0.5)
                assert [len(each) for each in row["top_logprobs"]] == [3] * (len(ids) - 40)
        assert (await server.http.get("/rl/sessions")).json()["sessions"] == [], "scores make no turn"


async def test_recorded_turns_are_scored_as_they_were_sampled(tmp_path: Path, reference: Path) -> None:
    async with serving_models(tmp_path, reference) as server:
        talk: list[Any] = []
        for text in ("hello", "again", "more"):
            talk.append(user(text))
            body = {"model": "policy", "messages": talk, "max_tokens": 12, "temperature": 1.0}
            talk.append((await server.ok("/s/v1/chat/completions", body))["choices"][0]["message"])
        shown = [
            (await server.http.get(f"/rl/sessions/s/interactions/{n}?include=ids,logprobs")).json() for n in range(3)
        ]
        own = (await server.ok("/v1/logprobs", {"session_id": "s"}))["data"]
        other = (await server.ok("/v1/logprobs", {"session_id": "s", "model": "reference"}))["data"]
        for turn, mine, theirs in zip(shown, own, other, strict=True):
            start = len(turn["prompt_ids"])
            assert (mine["session_id"], mine["interaction_id"], mine["start"]) == ("s", turn["id"], start)
            assert mine["logprobs"] == pytest.approx(turn["logprobs"], abs=TOLERANCE)
            assert theirs["logprobs"] == expected(reference, turn["prompt_ids"] + turn["output_ids"], start)
        named = await server.ok("/v1/logprobs", {"interaction_ids": [shown[2]["id"], shown[0]["id"]]})
        for row, mine in zip(named["data"], (own[2], own[0]), strict=True):
            assert row["logprobs"] == pytest.approx(mine["logprobs"], abs=TOLERANCE)
        assert len((await server.http.get("/rl/sessions/s")).json()["interactions"]) == 3


async def test_adapters_are_scored_by_their_versions(tmp_path: Path, reference: Path) -> None:
    pytest.importorskip("peft")
    folders = {n: write_adapter(builtin_model_folder(), tmp_path / str(n), n) for n in (1, 2)}
    async with serving_models(tmp_path, reference) as server:
        for version, folder in folders.items():
            await server.ok("/engine/adapters", {"path": str(folder), "version": version})
            body = {"model": "policy", "messages": [user("hello")], "max_tokens": 4}
            await server.ok(f"/s{version}/v1/chat/completions", body)  # the session keeps its version loaded
        for model, version in (("policy", 2), ("policy@1", 1), ("policy@2", 2)):
            (row,) = (await server.ok("/v1/logprobs", {"model": model, "input_ids": IDS}))["data"]
            assert row["version"] == version
            assert row["logprobs"] == expected(builtin_model_folder(), IDS, 1, adapter=folders[version])


async def test_scores_and_turns_run_at_once(tmp_path: Path, reference: Path) -> None:
    async with serving_models(tmp_path, reference) as server:

        async def play(name: str) -> None:
            talk: list[Any] = []
            for _ in range(3):
                talk.append(user("hello"))
                reply = await server.ok(f"/{name}/v1/chat/completions", {"messages": talk, "max_tokens": 20})
                talk.append(reply["choices"][0]["message"])

        playing = [asyncio.create_task(play(f"s{n}")) for n in range(4)]
        scored = await asyncio.gather(*(server.ok("/v1/logprobs", {"input_ids": IDS[n:]}) for n in range(12)))
        for n, reply in enumerate(scored):
            assert reply["data"][0]["logprobs"] == expected(builtin_model_folder(), IDS[n:], 1)
        await asyncio.gather(*playing)
        for n in range(4):
            for turn in (await server.http.get(f"/rl/sessions/s{n}")).json()["interactions"]:
                (row,) = (await server.ok("/v1/logprobs", {"interaction_ids": [turn["id"]]}))["data"]
                path = f"/rl/sessions/s{n}/interactions/{turn['id']}?include=logprobs"
                assert row["logprobs"] == pytest.approx((await server.http.get(path)).json()["logprobs"], abs=TOLERANCE)
