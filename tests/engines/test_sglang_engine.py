"""The real SGLang, embedded: the contract of all engines, exact logprobs, pauses and weight changes under load."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import (
    CHECKS,
    CollectedReply,
    ContractCheck,
    check_grammars_are_followed,
    complete,
    request_for,
)
from proxy.engine.interface import Capability, Engine, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.sglang.engine import Ranks, SglangEngine
from proxy.settings import Settings
from proxy.types import SamplingParams, ids_of
from tests.engines.devices import CPU_ARGUMENTS
from tests.engines.forward import check_logprobs, logprobs_over_old_keys, plain_logprobs
from tests.engines.gates import AdminGate
from tests.engines.updates import under_way, update_while_tokens_are_held_up
from tokengrove.errors import ConfigurationError, EngineUnavailable, InvalidRequest
from tokengrove.reasons import FinishReason

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
]

PROMPT = ids_of(range(40, 60))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sglang_engine(weights: dict[int, Path]) -> AsyncIterator[SglangEngine]:
    """One for the module: it takes half a minute to start, and 2 GB.

    It ends with the module. When SGLang closes an engine, it kills all children of its process, and the watchdog of
    another engine that is open would kill the process for that.
    """
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    engine = SglangEngine(Settings(engine_arg=CPU_ARGUMENTS), weights[0])
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture
def gate(sglang_engine: SglangEngine) -> AdminGate:
    return AdminGate(sglang_engine)


async def read(gate: AdminGate, request: GenerateRequest) -> CollectedReply:
    reply = CollectedReply()

    def take(chunk: TokenChunk) -> None:
        assert not chunk.corrected, "the embedded SGLang names versions rightly at once"
        reply.add(chunk)

    await gate.sample(request, take)
    return reply


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(sglang_engine: SglangEngine, check: ContractCheck) -> None:
    await check(sglang_engine, PROMPT)


async def test_contract_of_grammars(sglang_engine: SglangEngine, weights: dict[int, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights[0])
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    await check_grammars_are_followed(sglang_engine, PROMPT, tokenizer.decode, ends)


@pytest.mark.parametrize("seed", [0, 7, -(2**63), 2**63 - 1])
async def test_a_seed_is_taken_also_without_deterministic_inference(sglang_engine: SglangEngine, seed: int) -> None:
    assert len((await complete(sglang_engine, request_for(PROMPT, 3, seed=seed))).ids) == 3


async def test_it_implements_engine_and_reports_its_capabilities(sglang_engine: SglangEngine) -> None:
    info = sglang_engine.info()
    assert isinstance(sglang_engine, Engine)
    missing = {Capability.DETERMINISTIC, Capability.RELEASE_MEMORY, Capability.IMAGES, Capability.ADAPTERS}
    missing.add(Capability.PROMPT_TEMPERATURE)
    assert info.capabilities == frozenset(Capability) - missing
    assert info.vocab_size == 640
    assert info.detail.startswith("SGLang on cpu, float32") and info.max_running_requests == 64
    longest = info.context_length - len(PROMPT)
    assert len((await complete(sglang_engine, request_for(PROMPT, longest))).ids) == longest


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.3, top_p=0.8, top_k=40, min_p=0.01),
    ],
    ids=["1", "0.7", "0", "truncated"],
)
async def test_logprobs_equal_a_plain_forward_pass(sglang_engine, weights, sampling: SamplingParams) -> None:
    request = replace(request_for(PROMPT, 60), sampling=sampling._replace(max_tokens=60))
    reply = await complete(sglang_engine, request)
    folder = weights[sglang_engine.info().weight_version]
    expected = plain_logprobs(folder, PROMPT, reply.ids, sampling.temperature)
    assert reply.logprobs == pytest.approx(expected, abs=1e-4)


async def test_a_growing_session_reuses_its_prefix(sglang_engine) -> None:
    prompt, cached = ids_of(random.Random(1).choices(range(300), k=150)), []
    for _ in range(3):
        chunks = [chunk async for chunk in sglang_engine.generate(request_for(prompt, 40))]
        cached.append(chunks[0].cached_tokens)
        prompt = ids_of([*prompt, *(token for chunk in chunks for token in chunk.ids), 11, 12, 13])
    assert cached[0] < 20 and cached[1] >= 185 and cached[2] >= 225


async def abort_early(engine: SglangEngine, request: GenerateRequest) -> CollectedReply:
    """Abort a request once it has sampled 5 tokens."""
    reply, aborted = CollectedReply(), False
    async for chunk in engine.generate(request):
        reply.add(chunk)
        if len(reply.ids) >= 5 and not aborted:
            await engine.abort(request.request_id)
            aborted = True
    return reply


async def test_aborting_one_choice_leaves_the_other(sglang_engine) -> None:
    first, second = request_for(PROMPT, 400), request_for(PROMPT, 400)
    second = replace(second, request_id=f"{first.request_id}.1")
    replies = await asyncio.gather(abort_early(sglang_engine, first), complete(sglang_engine, second))
    assert replies[0].finish is FinishReason.ABORT and len(replies[0].ids) < 400
    assert replies[1].finish is FinishReason.LENGTH and len(replies[1].ids) == 400


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT, PauseMode.DRAIN])
async def test_tokens_around_an_update_have_the_logprobs_of_their_versions(gate, weights, mode: PauseMode) -> None:
    crowd = await under_way(gate, read, weights[0], 12, 300)
    assert await gate.admin.update_weights(str(weights[1]), 1, mode) == 1
    for prompt, reply in [(prompt, await coming) for prompt, coming in crowd]:
        assert len(reply.ids) == 300 and reply.finish is FinishReason.LENGTH
        assert reply.versions == sorted(reply.versions)
        check_logprobs(weights, prompt, reply.ids, reply.logprobs, reply.versions)
        assert set(reply.versions) == ({0} if mode is PauseMode.DRAIN else {0, 1})


async def test_an_update_right_after_clients_left_is_loaded_and_empties_the_prefix_cache(gate, weights) -> None:
    for version in (1, 2, 0, 1, 2, 0):
        begun = [asyncio.Event() for _ in range(4)]
        left = [asyncio.create_task(gate.read(request_for(PROMPT, 400), event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        assert await gate.admin.update_weights(str(weights[version]), version, PauseMode.DRAIN) == version
        reply = await gate.read(request_for(PROMPT, 20))
        assert reply.logprobs == pytest.approx(plain_logprobs(weights[version], PROMPT, reply.ids, 1.0), abs=1e-4)


@pytest.mark.parametrize("sampled", [0, 1, 40])
async def test_an_update_in_place_keeps_the_keys_of_the_old_weights(gate, weights, sampled: int) -> None:
    crowd = await under_way(gate, read, weights[0], 6, 300, sampled)
    await gate.admin.update_weights(str(weights[2]), 2, PauseMode.IN_PLACE)
    for prompt, reply in [(prompt, await coming) for prompt, coming in crowd]:
        change = reply.versions.count(0)
        assert reply.versions == [0] * change + [2] * (300 - change) and change < 300
        expected = logprobs_over_old_keys(weights[0], weights[2], prompt, reply.ids, change)
        assert reply.logprobs == pytest.approx(expected, abs=1e-4)
    await gate.admin.flush_cache()


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_tokens_delivered_after_an_update_keep_the_version_that_sampled_them(
    gate, weights, mode: PauseMode
) -> None:
    crowd = await under_way(gate, read, weights[0], 6, 200)
    await update_while_tokens_are_held_up(gate, os.getpid(), weights[1], 1, mode)
    for prompt, reply in [(prompt, await coming) for prompt, coming in crowd]:
        change = reply.versions.count(0)
        assert reply.versions == [0] * change + [1] * (200 - change) and 0 < change < 200
        if mode is PauseMode.IN_PLACE:
            expected = logprobs_over_old_keys(weights[0], weights[1], prompt, reply.ids, change)
            assert reply.logprobs == pytest.approx(expected, abs=1e-4)
        else:
            check_logprobs(weights, prompt, reply.ids, reply.logprobs, reply.versions)
    await gate.admin.flush_cache()


async def test_random_pauses_and_updates_lose_no_token(gate, weights) -> None:
    rng = random.Random(11)
    await gate.admin.update_weights(str(weights[0]), 0, PauseMode.DRAIN)
    prompts = [ids_of(rng.choices(range(600), k=rng.randint(1, 120))) for _ in range(40)]
    lengths = [rng.randint(1, 250) for _ in prompts]

    async def agent(prompt, length: int, delay_s: float) -> CollectedReply:
        await asyncio.sleep(delay_s)
        return await read(gate, request_for(prompt, length))

    running = [
        asyncio.create_task(agent(prompt, length, rng.random()))
        for prompt, length in zip(prompts, lengths, strict=True)
    ]
    while not all(task.done() for task in running):
        mode = rng.choice([PauseMode.ABORT, PauseMode.RETRACT])
        if rng.random() < 0.5:
            await gate.admin.pause(mode)
            await asyncio.sleep(rng.random() * 0.1)
            await gate.admin.resume()
        else:
            version = rng.randrange(3)
            await gate.admin.update_weights(str(weights[version]), version, mode)
        await asyncio.sleep(rng.random() * 0.4)
    for prompt, length, task in zip(prompts, lengths, running, strict=True):
        reply = task.result()
        assert len(reply.ids) == length
        check_logprobs(weights, prompt, reply.ids, reply.logprobs, reply.versions)


async def test_weights_of_another_model_are_refused_and_the_old_ones_stay(gate, weights, tmp_path: Path) -> None:
    before = gate.info().weight_version
    with pytest.raises(InvalidRequest, match=r"no config\.json"):
        await gate.admin.update_weights(str(tmp_path), None, PauseMode.ABORT)
    assert gate.info().weight_version == before and gate.state.paused is None
    await read(gate, request_for(PROMPT, 4))


async def test_releasing_memory_needs_the_memory_saver(sglang_engine) -> None:
    with pytest.raises(EngineUnavailable, match="enable_memory_saver"):
        await sglang_engine.release_memory()


async def test_an_argument_that_sglang_does_not_know_is_a_configuration_error(weights) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    with pytest.raises(ConfigurationError, match="no_such_thing"):
        await SglangEngine(Settings(engine_arg=("no_such_thing=1",)), weights[0]).start()


async def test_a_session_keeps_its_rank_and_new_ones_go_to_the_least_loaded() -> None:
    ranks = Ranks(2)
    first, second = ranks.take("a"), ranks.take("b")
    assert {first, second} == {0, 1}
    ranks.give_back(first)
    assert ranks.take("c") == first
    assert ranks.take("b") == second
    assert Ranks(1).take("a") is None
