"""LoRA adapters in the transformers engine: several versions in one batch, each as PEFT computes it, and no shared
prefix between two of them or with the base model."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proxy.engine.contract import CHECKS, CollectedReply, check_adapters_are_versions, complete, request_for
from proxy.engine.interface import AdapterEngine, AdapterSource, Capability, PauseMode
from proxy.engine.transformers import adapters as hooks
from proxy.engine.transformers.engine import TransformersEngine
from proxy.engine.transformers.experts import expert_modules
from proxy.settings import Settings
from proxy.side_columns.columns import EXPERTS, ColumnRequest
from proxy.types import Ids, ids_of
from tests.adapters import ATTENTION, LATENT, adapted_model, adapter_logprobs, write_adapter
from tests.engines.gates import AdminGate
from tests.mixtures import build_mixture
from tests.support import until
from tokengrove.errors import EngineIncapable, EngineUnavailable, InvalidRequest
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

torch = pytest.importorskip("torch")
pytest.importorskip("peft")
pytest.importorskip("llguidance")

SHARED = ids_of([41 + place % 60 for place in range(100)])
"""A prompt of three whole pages of the cache."""
WHOLE = 96
MLP = ("gate_proj", "up_proj", "down_proj")
TOLERANCE = 3e-5  # float32 in another order of additions: 1.05e-5 was seen


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[TransformersEngine]:
    engine = TransformersEngine(Settings(engine_arg=("cache_mb=16",)), folder)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_mixture(tmp_path_factory.mktemp("qwen3"), "qwen3")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Adapters of different weights, by the version that tests give them."""
    return adapters_of(model, tmp_path_factory.mktemp("adapters"), (*ATTENTION, *MLP))


def adapters_of(model: Path, folder: Path, targets: Sequence[str]) -> dict[int, Path]:
    return {seed: write_adapter(model, folder / str(seed), seed, targets=targets) for seed in (1, 2, 3, 4)}


@pytest.fixture
async def engine(model: Path) -> AsyncIterator[TransformersEngine]:
    async with running(model) as engine:
        yield engine


async def load(engine: TransformersEngine, adapters: dict[int, Path], *versions: int) -> None:
    for version in versions:
        await engine.load_adapter(version, AdapterSource(str(adapters[version])))


async def ask(
    engine: TransformersEngine, version: int | None, max_tokens: int = 20, prompt: Ids = SHARED
) -> tuple[CollectedReply, int | None]:
    """The reply of a version, and how many tokens of the prompt were cached."""
    reply, cached = CollectedReply(), None
    async for chunk in engine.generate(replace(request_for(prompt, max_tokens), adapter=version)):
        reply.add(chunk)
        cached = chunk.cached_tokens if chunk.cached_tokens is not None else cached
    return reply, cached


def check(reply: CollectedReply, model: Path, adapter: Path | None, version: int, prompt: Ids = SHARED) -> None:
    """Assert that a reply is of one version, and as likely as PEFT says."""
    assert set(reply.versions) == {version}
    assert reply.logprobs == pytest.approx(adapter_logprobs(model, adapter, prompt, reply.ids), abs=TOLERANCE)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[set[int]]:
    """The versions in each step that had an adapter."""
    found: list[set[int]] = []
    plan = hooks._rows_of

    def noting(entries: Any, device: Any) -> Any:
        step = plan(entries, device)
        if step is not None:
            versions = {adapter.version for adapter, _ in step.of}
            found.append(versions | {0} if any(entry.adapter is None for entry in entries) else versions)
        return step

    monkeypatch.setattr(hooks, "_rows_of", noting)
    return found


async def three_versions_and_the_base(
    model: Path, adapters: dict[int, Path], steps: list[set[int]], shared: int = WHOLE
) -> None:
    """Sample with a fourth version that goes and comes meanwhile, then again with `shared` tokens from the cache."""
    versions = [4, None, 1, 2, 3, 3, 2, 1, None]
    async with running(model) as engine:
        await load(engine, adapters, 1, 2, 3, 4)
        for again in (False, True):
            await engine.pause(PauseMode.IN_PLACE)
            asked = [asyncio.create_task(ask(engine, each, 12 + place)) for place, each in enumerate(versions)]
            await until(lambda: len(engine._in_flight()) == len(versions))
            await engine.resume()
            await engine.unload_adapter(4)
            await load(engine, adapters, 4)
            later = await ask(engine, 4, 4)
            replies = await asyncio.gather(*asked)
            for version, (reply, cached) in zip([4, *versions], [later, *replies], strict=True):
                check(reply, model, adapters.get(version or 0), version or 0)
                assert not again or version == 4 or cached == shared
            assert later[1] == 0
    assert {0, 1, 2, 3, 4} in steps


@pytest.mark.wide
async def test_three_versions_and_the_base_model_sample_in_one_batch(model, adapters, steps) -> None:
    await three_versions_and_the_base(model, adapters, steps)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("kind", "targets", "shared"),
    [
        ("qwen3_moe", ATTENTION, WHOLE),
        ("deepseek_v3", LATENT, WHOLE),
        ("deepseek_v2", LATENT, WHOLE),
        ("mixtral", ATTENTION, 0),  # sliding windows
    ],
)
async def test_versions_sample_in_one_batch_of_other_families(kind, targets, shared, tmp_path: Path, steps) -> None:
    model = build_mixture(tmp_path / "model", kind)
    await three_versions_and_the_base(model, adapters_of(model, tmp_path, targets), steps, shared)


async def test_no_prefix_is_shared_between_versions_or_with_the_base_model(engine, model, adapters) -> None:
    await load(engine, adapters, 1, 2)
    found = []
    for version in (None, 1, 2, None, 1, 2):
        reply, cached = await ask(engine, version, 4)
        check(reply, model, adapters.get(version or 0), version or 0)
        found.append(cached)
    assert found == [0, 0, 0, WHOLE, WHOLE, WHOLE]


async def test_a_version_that_is_loaded_again_with_other_weights_has_no_old_prefix(engine, model, adapters) -> None:
    for adapter in (adapters[1], adapters[2], adapters[1]):
        await engine.load_adapter(7, AdapterSource(str(adapter)))
        for expected in (0, WHOLE):
            reply, cached = await ask(engine, 7, 4)
            check(reply, model, adapter, 7)
            assert cached == expected
        await engine.unload_adapter(7)


@pytest.mark.wide
async def test_adapters_stay_loaded_when_the_base_model_gets_new_weights(model, adapters, tmp_path: Path) -> None:
    other = build_mixture(tmp_path / "other", "qwen3", seed=1)
    async with running(model) as engine:
        await load(engine, adapters, 1)
        await ask(engine, 1, 4)
        chunks = engine.generate(replace(request_for(SHARED, 300), adapter=1))
        interrupted = [await anext(chunks)]
        await engine.pause(PauseMode.IN_PLACE)
        assert await engine.update_weights(str(other), version=5) == 5
        await engine.resume()
        check((await ask(engine, 1, 4))[0], other, adapters[1], 1)
        check((await ask(engine, None, 4))[0], other, None, 5)
        interrupted += [chunk async for chunk in chunks]
    ids = [token for chunk in interrupted for token in chunk.ids]
    expected = adapter_logprobs(other, adapters[1], SHARED, ids)[-1:]
    assert [*interrupted[-1].logprobs] == pytest.approx(expected, abs=TOLERANCE)
    assert {chunk.version for chunk in interrupted} == {1} and len(ids) == 300


async def test_an_unloaded_version_serves_its_requests_to_the_end_and_takes_no_new_ones(engine, model, adapters):
    await load(engine, adapters, 1)
    reply = CollectedReply()
    async for chunk in engine.generate(replace(request_for(SHARED, 40), adapter=1)):
        if not reply.ids:
            await engine.unload_adapter(1)
            await engine.unload_adapter(1)  # unknown versions are ignored
            with pytest.raises(EngineUnavailable, match="the adapter of version 1 is not loaded; loaded: none"):
                await complete(engine, replace(request_for(SHARED, 4), adapter=1))
        reply.add(chunk)
    check(reply, model, adapters[1], 1)


async def test_an_unloaded_version_continues_beside_its_successor_of_the_same_number(engine, model, adapters) -> None:
    await load(engine, adapters, 1)
    reply, later = CollectedReply(), None
    async for chunk in engine.generate(replace(request_for(SHARED, 60), adapter=1)):
        if not reply.ids:
            await engine.unload_adapter(1)
            await engine.load_adapter(1, AdapterSource(str(adapters[2])))
            later = asyncio.create_task(ask(engine, 1))
        reply.add(chunk)
    assert later is not None
    check(reply, model, adapters[1], 1)
    check((await later)[0], model, adapters[2], 1)


async def test_unloading_drops_the_cached_prefixes(engine, adapters) -> None:
    keys = engine._running().prefix_keys
    await load(engine, adapters, 1, 2)
    held = {version: engine._able().named(version).prefix_key for version in (1, 2)}
    for version in (1, 2):
        await ask(engine, version, 4)
    assert [keys.cached(key) for key in held.values()] == [3, 3]
    await engine.unload_adapter(1)
    await ask(engine, None, 1)
    assert [keys.cached(key) for key in held.values()] == [0, 3]
    assert (await ask(engine, 2, 1))[1] == WHOLE


async def test_a_version_that_is_not_loaded_is_refused_by_name(engine, adapters) -> None:
    await load(engine, adapters, 1, 3)
    with pytest.raises(EngineUnavailable, match="the adapter of version 2 is not loaded; loaded: 1, 3"):
        await complete(engine, replace(request_for(SHARED, 4), adapter=2))


async def test_an_adapter_that_does_not_fit_is_refused_and_disturbs_nothing(engine, model, adapters, tmp_path) -> None:
    from tests.engines.test_transformers_engine import build_tiny_model

    build_tiny_model(tmp_path / "tiny")
    stranger = write_adapter(tmp_path / "tiny", tmp_path / "stranger")
    await load(engine, adapters, 1)
    with pytest.raises(InvalidRequest, match="the adapter is of another base model"):
        await engine.load_adapter(2, AdapterSource(str(stranger)))
    with pytest.raises(InvalidRequest, match="another adapter is loaded as version 1; unload it first"):
        await engine.load_adapter(1, AdapterSource(str(adapters[2])))
    await load(engine, adapters, 1)  # the same again
    check((await ask(engine, 1, 4))[0], model, adapters[1], 1)


async def test_an_adapter_that_a_trainer_sends_needs_no_folder(engine, model, adapters) -> None:
    config = json.loads((adapters[1] / "adapter_config.json").read_text())
    tensors = (adapters[1] / "adapter_model.safetensors").read_bytes()
    await engine.load_adapter(1, AdapterSource("/nowhere", config, tensors))
    check((await ask(engine, 1, 4))[0], model, adapters[1], 1)


@pytest.mark.parametrize(
    "lora",
    [
        {"use_rslora": True, "r": 5, "lora_alpha": 7},
        {"rank_pattern": {"q_proj": 2, "layers.1.self_attn.v_proj": 6}, "alpha_pattern": {"v_proj": 3}},
        {"targets": MLP, "layers_to_transform": [0, 2]},
        {"targets": r".*layers\.1\..*(o_proj|down_proj)"},
        {"targets": "all-linear", "exclude_modules": ["k_proj"], "init_lora_weights": "gaussian", "lora_dropout": 0.5},
    ],
    ids=["rslora", "patterns", "layers", "pattern", "all-linear"],
)
async def test_ranks_scales_and_targets_are_those_of_peft(engine, model, tmp_path: Path, lora: Any) -> None:
    adapter = write_adapter(model, tmp_path / "adapter", **lora)
    await engine.load_adapter(1, AdapterSource(str(adapter)))
    check((await ask(engine, 1, 6))[0], model, adapter, 1)


async def test_pauses_and_a_flush_change_no_token(model, adapters) -> None:
    async with running(model) as engine:
        await load(engine, adapters, 1)
        gate = AdminGate(engine)
        for mode in (PauseMode.IN_PLACE, PauseMode.RETRACT, PauseMode.ABORT):
            begun = asyncio.Event()
            reading = asyncio.create_task(gate.read(replace(request_for(SHARED, 60), adapter=1), begun))
            await begun.wait()
            await gate.admin.pause(mode)
            await gate.admin.resume()
            await engine.flush_cache()
            check(await reading, model, adapters[1], 1)


async def test_adapters_come_back_with_the_released_memory(engine, model, adapters) -> None:
    await load(engine, adapters, 1)
    await engine.pause(PauseMode.ABORT)
    await engine.release_memory()
    await engine.resume_memory()
    await engine.resume()
    check((await ask(engine, 1, 4))[0], model, adapters[1], 1)


async def test_an_aborted_request_ends_with_its_own_version(engine, adapters) -> None:
    await load(engine, adapters, 3)
    request = replace(request_for(SHARED, 1000), adapter=3)
    last = None
    async for chunk in engine.generate(request):
        await engine.abort(request.request_id)
        last = chunk
    assert last is not None and last.finish is FinishReason.ABORT and last.version == 3


@pytest.mark.engines
async def test_recorded_experts_are_those_that_the_adapter_routes_to(tmp_path: Path) -> None:
    model = build_mixture(tmp_path / "model", "qwen3_moe")
    adapters = adapters_of(model, tmp_path, ATTENTION)
    columns = ColumnRequest(frozenset({Replay.EXPERTS}))
    async with running(model) as engine:
        await load(engine, adapters, 1, 2)
        for version in (None, 1, 2, 1, None):
            request = replace(request_for(SHARED, 12), adapter=version, columns=columns)
            chunks = [chunk async for chunk in engine.generate(request)]
            ids = [*SHARED, *(token for chunk in chunks for token in chunk.ids)]
            found = [chunk.columns[EXPERTS].rows.values for chunk in chunks if chunk.columns]
            rows = torch.cat([torch.as_tensor(each).long() for each in found]).sort(-1).values
            assert torch.equal(rows, chosen_experts(model, adapters.get(version or 0), ids[:-1]))


def chosen_experts(model: Path, adapter: Path | None, ids: Sequence[int]) -> Any:
    """The experts of each token in each layer, in ascending order, by a pass of PEFT's model."""
    adapted, chosen = adapted_model(model, adapter), []
    noting = [
        module.register_forward_pre_hook(lambda _, args: chosen.append(args[1])) for module in expert_modules(adapted)
    ]
    with torch.no_grad():
        adapted(torch.tensor([list(ids)]), use_cache=False)
    for hook in noting:
        hook.remove()
    return torch.stack(chosen, 1).sort(-1).values


async def test_it_keeps_the_contract_with_adapters(engine, adapters) -> None:
    assert isinstance(engine, AdapterEngine) and Capability.ADAPTERS in engine.info().capabilities
    for check_engine in CHECKS:
        if "adapter" in check_engine.__name__:
            await check_engine(engine, SHARED)
    await check_adapters_are_versions(engine, SHARED, AdapterSource(str(adapters[1])), AdapterSource(str(adapters[2])))


async def test_without_peft_it_has_no_adapters_and_says_how_to_get_them(model, adapters, monkeypatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "proxy.engine.transformers.engine.find_spec", lambda name: None if name == "peft" else find(name)
    )
    async with running(model) as engine:
        assert Capability.ADAPTERS not in engine.info().capabilities
        with pytest.raises(EngineIncapable, match=r"adapters need the package peft: pip install 'tokengrove\[peft\]'"):
            await engine.load_adapter(1, AdapterSource(str(adapters[1])))
        with pytest.raises(EngineIncapable, match="peft"):
            await complete(engine, replace(request_for(SHARED, 4), adapter=1))
        await engine.unload_adapter(1)
