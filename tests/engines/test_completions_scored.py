"""`/v1/completions` with `echo` and `logprobs`: the prompt's tokens have the logprobs of forward passes in float32."""

from __future__ import annotations

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
from tests.adapters import adapter_logprobs
from tests.api.test_streaming import events
from tests.support import Server, default_url, tiny_renderer

pytest.importorskip("torch")
pytest.importorskip("llguidance")

pytestmark = pytest.mark.engines
PATH = "/s/v1/completions"
TOLERANCE = 1e-4
TEXT = "Once upon a time there was a caf\u00e9 \u2603 by the \U0001f30a"
IDS = tiny_renderer().encode(TEXT).tolist()
OTHER = [n * 37 % 400 + 40 for n in range(70)]


@asynccontextmanager
async def serving_model(folder: Path) -> AsyncIterator[Server]:
    app = build_app(Settings(database_url=default_url(folder), migrate=True, engine="transformers"))
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", timeout=120)
    async with app.router.lifespan_context(app), client as http:
        yield Server(app, http, app.state.engine)


def forward(ids: list[int], start: int, temperature: float = 1.0) -> Any:
    found = adapter_logprobs(builtin_model_folder(), None, ids[:start], ids[start:], temperature)
    return pytest.approx(found, abs=TOLERANCE)


def check(choice: Any, ids: list[int], temperature: float = 1.0) -> None:
    """Assert that a choice has the logprobs of its prompt and of what was sampled."""
    told = choice["logprobs"]
    whole = choice["prompt_token_ids"] + choice["token_ids"]
    assert choice["prompt_token_ids"] == ids
    assert {len(values) for values in told.values()} == {len(whole)}
    assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
    assert told["token_logprobs"][1:] == forward(whole, 1, temperature)
    for logprob, top in zip(told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True):
        assert logprob in top.values() and max(top.values()) >= logprob


async def test_the_body_of_lm_evals_log_likelihoods_gets_those_of_a_forward_pass(tmp_path: Path) -> None:
    async with serving_model(tmp_path) as server:
        body = {"prompt": [IDS, OTHER, IDS[:1]], "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": True}
        reply = await server.ok(PATH, {**body, "seed": 1234, "return_token_ids": True})
        assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
        for choice, ids in zip(reply["choices"], (IDS, OTHER, IDS[:1]), strict=True):
            check(choice, ids)
            assert all(len(top) <= 2 for top in choice["logprobs"]["top_logprobs"][1:])
        samples = await server.export()
        assert sorted(sample["input_ids"] for sample in samples) == sorted(
            choice["prompt_token_ids"] + choice["token_ids"] for choice in reply["choices"]
        )
        assert [sum(sample["loss_mask"]) for sample in samples] == [1, 1, 1], "scores are in no export"


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_a_prompt_has_the_temperature_of_its_turn_in_replies_and_streams(
    tmp_path: Path, temperature: float
) -> None:
    async with serving_model(tmp_path) as server:
        body: dict[str, Any] = {
            "prompt": TEXT,
            "max_tokens": 6,
            "temperature": temperature,
            "logprobs": 3,
            "echo": True,
        }
        body |= {"return_token_ids": True, "seed": 5}
        (choice,) = (await server.ok(PATH, body))["choices"]
        check(choice, IDS, temperature)
        told = choice["logprobs"]
        assert choice["text"].startswith(TEXT)
        offsets = [
            told["text_offset"][index] for index, piece in enumerate(told["tokens"]) if piece in (" upon", " by")
        ]
        assert offsets == [choice["text"].index(word) for word in (" upon", " by") if word in told["tokens"]]
        assert told["text_offset"][len(IDS)] == len(TEXT)
        streamed = await server.post(PATH, {**body, "stream": True})
        *chunks, _ = events(streamed.text)
        parts = [part for chunk in chunks for part in chunk["choices"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        joined = [value for part in parts if part["logprobs"] for value in part["logprobs"]["token_logprobs"]]
        assert joined[0] is None and joined[1:] == pytest.approx(told["token_logprobs"][1:], abs=TOLERANCE)


async def test_a_retry_has_the_same_answer_and_the_prompts_logprobs(tmp_path: Path) -> None:
    async with serving_model(tmp_path) as server:
        body = {"prompt": OTHER, "max_tokens": 3, "logprobs": 0, "echo": True, "return_tokens_as_token_ids": True}
        first = await server.ok(PATH, body, headers={"idempotency-key": "k"})
        again = await server.ok(PATH, body, headers={"idempotency-key": "k"})
        assert again["id"] == first["id"] and again["choices"][0]["text"] == first["choices"][0]["text"]
        told, repeated = first["choices"][0]["logprobs"], again["choices"][0]["logprobs"]
        assert repeated["tokens"] == told["tokens"] and told["tokens"][: len(OTHER)] == [f"token_id:{n}" for n in OTHER]
        assert repeated["token_logprobs"][1:] == pytest.approx(told["token_logprobs"][1:], abs=TOLERANCE)
        (node,) = await server.tree()
        stored = json.dumps(node)
        assert "prompt_logprobs" not in stored


async def test_a_prompt_too_long_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    async with serving_model(tmp_path) as server:
        long = OTHER * 3000
        response = await server.post(PATH, {"prompt": [OTHER, long], "max_tokens": 1, "logprobs": 1, "echo": True})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["code"] == "context_length_exceeded"
        assert await server.tree() == []
