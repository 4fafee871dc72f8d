"""Logprobs of prompt tokens by the transformers engine, against forward passes in float32."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import complete, request_for
from proxy.engine.interface import AdapterSource, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.transformers.engine import TransformersEngine
from proxy.settings import Settings
from proxy.types import ids_of
from tests.adapters import adapted_model, adapter_logprobs, write_adapter
from tests.mixtures import build_mixture
from tests.support import until

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.skipif("SGLANG_USE_CPU_ENGINE" in os.environ, reason="runs where the server is installed")

PROMPT = tuple(n * 37 % 400 + 40 for n in range(150))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mixture(tmp_path_factory.mktemp("model"), "qwen3")


@asynccontextmanager
async def engine_of(model: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(Settings(engine_arg=("cache_mb=16", "batch_tokens=64")), model)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def scoring(
    prompt: Sequence[int], start: int, top: int = 0, temperature: float = 1.0, adapter: int | None = None
) -> GenerateRequest:
    request = request_for(ids_of(prompt), 1, temperature)
    return replace(request, scored_from=start, top_logprobs=top, adapter=adapter, whole=True)


async def scores_of(engine: TransformersEngine, request: GenerateRequest) -> TokenChunk:
    chunks = [chunk async for chunk in engine.generate(request)]
    (found,) = [chunk for chunk in chunks if chunk.prompt_logprobs is not None]
    return found


def check(model: Path, request: GenerateRequest, found: TokenChunk, adapter: Path | None = None) -> None:
    start, ids = request.scored_from or 0, request.input_ids
    expected = adapter_logprobs(model, adapter, ids[:start], ids[start:], request.sampling.temperature)
    assert found.prompt_logprobs is not None
    assert list(found.prompt_logprobs) == pytest.approx(expected, abs=TOLERANCE)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_scores_are_those_of_a_forward_pass(model: Path, temperature: float) -> None:
    async with engine_of(model) as engine:
        for start in (1, 149, 2, 65, 63, 64, 32, 33, 150 - 32, 1):
            request = scoring(PROMPT, start, temperature=temperature)
            found = await scores_of(engine, request)
            check(model, request, found)
            assert found.prompt_top == ()
            assert (found.cached_tokens or 0) <= start - 1


async def test_a_prefix_before_the_scored_tokens_is_cached(model: Path) -> None:
    async with engine_of(model) as engine:
        await complete(engine, request_for(ids_of(PROMPT), 1))
        assert (await scores_of(engine, scoring(PROMPT, 130))).cached_tokens == 128
        assert (await scores_of(engine, scoring(PROMPT, 128))).cached_tokens == 96
        assert (await scores_of(engine, scoring(PROMPT, 1))).cached_tokens == 0


async def test_alternatives_are_the_likeliest_tokens(model: Path) -> None:
    import torch

    async with engine_of(model) as engine:
        found = await scores_of(engine, scoring(PROMPT, 100, top=5))
        with torch.no_grad():
            logits = adapted_model(model, None)(torch.tensor([PROMPT]), use_cache=False).logits[0, 99:-1]
        values, tokens = logits.log_softmax(-1).topk(5)
        assert [[token for token, _ in row] for row in found.prompt_top] == tokens.tolist()
        assert [[value for _, value in row] for row in found.prompt_top] == [
            pytest.approx(row, abs=TOLERANCE) for row in values.tolist()
        ]


async def test_prompts_are_scored_while_others_are_continued(model: Path) -> None:
    async with engine_of(model) as engine:
        turns = [asyncio.create_task(complete(engine, request_for(ids_of(PROMPT[n:]), 40, 0.0))) for n in range(6)]
        requests = [scoring(PROMPT[n:], start, top=n % 3) for n in range(6) for start in (1, 40, 100)]
        scored = await asyncio.gather(*(scores_of(engine, request) for request in requests))
        for request, found in zip(requests, scored, strict=True):
            check(model, request, found)
        for n, turn in enumerate(turns):
            reply = await turn
            expected = adapter_logprobs(model, None, PROMPT[n:], reply.ids)
            assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_scores_across_an_update_are_of_one_version(model: Path, tmp_path: Path) -> None:
    other = build_mixture(tmp_path, "qwen3", seed=7)
    async with engine_of(model) as engine:
        requests = [scoring(PROMPT[n:], 1 + n) for n in range(8)]
        for version in range(1, 5):
            new, old = (other, model) if version % 2 else (model, other)
            tasks = [asyncio.create_task(scores_of(engine, request)) for request in requests]
            await until(lambda: bool(engine._flights) or all(task.done() for task in tasks))  # noqa: B023
            await engine.pause(PauseMode.RETRACT)
            await engine.update_weights(str(new), version)
            await engine.resume()
            for request, task in zip(requests, tasks, strict=True):
                found = await task
                check(new if found.version == version else old, request, found)


async def test_scores_of_an_adapter_are_its_own(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = write_adapter(model, tmp_path / "adapter", 3)
    async with engine_of(model) as engine:
        await engine.load_adapter(2, AdapterSource(str(folder)))
        requests = [scoring(PROMPT, start, adapter=adapter) for start in (1, 129) for adapter in (2, None, 2, None)]
        found = await asyncio.gather(*(scores_of(engine, request) for request in requests))
        for request, scores in zip(requests, found, strict=True):
            check(model, request, scores, folder if request.adapter else None)
            assert scores.version == (request.adapter or 0)
