"""LoRA adapters in the transformers engine: several versions in one batch, each as PEFT computes it, and no shared
prefix between two of them or with the base model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.contract import CollectedReply, complete, request_for
from proxy.engine.interface import AdapterEngine, AdapterSource, Capability, PauseMode
from proxy.engine.tiny.model import build_tiny_model
from proxy.engine.transformers.engine import TransformersEngine
from proxy.settings import Settings
from proxy.types import Ids, ids_of
from tests.adapters import ATTENTION, LATENT, adapter_logprobs, write_adapter
from tests.mixtures import build_mixture
from tokengrove.errors import EngineUnavailable, InvalidRequest
from tokengrove.reasons import FinishReason

pytest.importorskip("torch")
pytest.importorskip("peft")

SHARED = ids_of([41 + place % 60 for place in range(100)])
"""A prompt of three whole pages of the cache."""
MLP = ("gate_proj", "up_proj", "down_proj")
TOLERANCE = 1e-5


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(Settings(), folder)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def sample(
    engine: TransformersEngine, version: int | None, max_tokens: int = 24, prompt: Ids = SHARED, **fields: object
) -> tuple[CollectedReply, int | None]:
    """The reply of a version, and how many tokens of its prompt were cached."""
    reply, cached = CollectedReply(), None
    request = replace(request_for(prompt, max_tokens), adapter=version, **fields)
    async for chunk in engine.generate(request):
        reply.add(chunk)
        cached = chunk.cached_tokens if chunk.cached_tokens is not None else cached
    return reply, cached


def check(
    reply: CollectedReply, model: Path, adapter: Path | None, version: int, prompt: Sequence[int] = SHARED
) -> None:
    """Assert that a reply is of one version, and as likely as PEFT says."""
    assert set(reply.versions) == {version}
    assert reply.logprobs == pytest.approx(adapter_logprobs(model, adapter, prompt, reply.ids), abs=TOLERANCE)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "deepseek_v3"])
async def test_x(kind, tmp_path):
    model = build_mixture(tmp_path / "model", kind)
    targets = LATENT if kind.startswith("deepseek") else ATTENTION
    adapters = {v: write_adapter(model, tmp_path / f"a{v}", v, targets=targets) for v in (1, 2, 3)}
    async with running(model) as engine:
        for v, a in adapters.items():
            await engine.load_adapter(v, AdapterSource(str(a)))
        todo = [None, 1, 2, 3] * 3
        for _ in range(2):
            replies = await asyncio.gather(*(sample(engine, v) for v in todo))
            for v, (reply, cached) in zip(todo, replies):
                print(v, cached)
                check(reply, model, adapters.get(v), v or 0)
