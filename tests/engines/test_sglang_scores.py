"""The real SGLang, embedded and as a server: logprobs of prompts are those of own forward passes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from proxy.engine.contract import request_for
from proxy.engine.interface import AdapterSource, Capability, PauseMode
from proxy.engine.servers.pool import Pool
from proxy.engine.sglang.engine import SglangEngine
from proxy.engine.tiny.vision import VisionKind, build_tiny_vision_model
from proxy.settings import Settings
from proxy.types import ids_of
from tests.adapters import write_adapter
from tests.engines.devices import CPU_ARGUMENTS
from tests.engines.engine_process import EngineProcess, pool_of
from tests.engines.forward import check_logprobs, plain_logprobs
from tests.engines.gates import AdminGate
from tests.engines.scoring import check_scored, check_scored_after_images, scored, scoring, tokens
from tests.engines.test_sglang_adapters import EMBEDDED_LORA, LORA
from tests.engines.test_sglang_server import ARGUMENTS, Server
from tests.engines.test_sglang_server_images import seeing
from tokengrove.errors import InvalidRequest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

CHUNK = 256
"""Tokens that SGLang computes at once, so that longer prompts take several steps."""


@pytest.fixture(scope="module")
def adapter(weights: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    return write_adapter(weights[0], tmp_path_factory.mktemp("adapter"), 1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedded(weights: dict[int, Path], adapter: Path) -> AsyncIterator[SglangEngine]:
    arguments = (*CPU_ARGUMENTS, *EMBEDDED_LORA, f"chunked_prefill_size={CHUNK}")
    engine = SglangEngine(Settings(engine_arg=arguments), weights[0])
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def server(
    weights: dict[int, Path], adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(weights[0]), *ARGUMENTS, *LORA]
    command += ["--chunked-prefill-size", str(CHUNK)]
    log = tmp_path_factory.mktemp("server") / "log"
    started = EngineProcess(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log, "/model_info")
    started.wait_ready()
    yield started
    started.kill()


@pytest_asyncio.fixture(loop_scope="module", params=["server", "embedded"])
async def engine(
    request: pytest.FixtureRequest, server: EngineProcess, embedded: SglangEngine
) -> AsyncIterator[SglangEngine | Pool]:
    if request.param == "embedded":
        yield embedded
        return
    async with pool_of(server.url) as pool:
        yield pool


async def test_all_logprobs_of_a_prompt_are_those_of_a_forward_pass(
    engine: SglangEngine | Pool, weights: dict[int, Path]
) -> None:
    able = engine.info().capabilities
    assert Capability.PROMPT_LOGPROBS in able and Capability.PROMPT_TEMPERATURE not in able
    for number, (length, top) in enumerate([(1, 0), (2, 3), (60, 0), (60, 5), (3 * CHUNK + 7, 2)]):
        await check_scored(engine, scoring(tokens(number, length), 1, top), weights[0])


async def test_every_first_position_also_with_a_cached_prefix(
    engine: SglangEngine | Pool, weights: dict[int, Path]
) -> None:
    await engine.flush_cache()
    prompt = tokens(10, 90)
    await check_scored(engine, scoring(prompt[:70] + tokens(11, 10), 1, 2), weights[0])
    for first in (1, 2, 69, 70, 71, 80, 89, 90):
        chunk = await check_scored(engine, scoring(prompt, first, first % 3), weights[0])
        assert (chunk.cached_tokens or 0) < first  # the token before the first scored one is computed again
        if first > 80:
            assert chunk.cached_tokens == first - 1


async def test_the_last_token_of_the_vocabulary(engine: SglangEngine | Pool, weights: dict[int, Path]) -> None:
    last = engine.info().vocab_size - 1
    prompt = tokens(12, 20) + ids_of([last, 0, last, 5])
    await check_scored(engine, scoring(prompt, 1, 2), weights[0])
    await check_scored(engine, scoring(prompt, 21), weights[0])


async def test_prompts_are_scored_between_turns(engine: SglangEngine | Pool, weights: dict[int, Path]) -> None:
    gate = AdminGate(engine)
    turns = [replace(request_for(tokens(20 + n, 40), 150, temperature=0.7), session_id=f"t{n}") for n in range(6)]
    running = [asyncio.create_task(gate.read(turn)) for turn in turns]
    shared = tokens(30, 40)
    asked = [scoring(shared + tokens(31 + n, 20 + 90 * n), 1 + 20 * n, n % 3) for n in range(6)]
    await asyncio.gather(*(check_scored(engine, request, weights[0]) for request in asked))
    for turn, reply in zip(turns, await asyncio.gather(*running), strict=True):
        assert len(reply.ids) == 150
        expected = plain_logprobs(weights[0], turn.input_ids, reply.ids, 0.7)
        assert reply.logprobs == pytest.approx(expected, abs=1e-4)


async def test_with_an_adapter(engine: SglangEngine | Pool, weights: dict[int, Path], adapter: Path) -> None:
    await engine.load_adapter(1, AdapterSource(str(adapter)))
    prompt = tokens(40, 300)
    for first in (1, 100, 299):
        with_adapter = await check_scored(engine, scoring(prompt, first, 2, adapter=1), weights[0], adapter)
        assert with_adapter.version == 1
        await check_scored(engine, scoring(prompt, first, 2), weights[0])
    await engine.unload_adapter(1)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
async def test_sglang_takes_no_temperature_for_them(
    engine: SglangEngine | Pool, weights: dict[int, Path], temperature: float
) -> None:
    request = scoring(tokens(50, 40), 5, 2)
    sampling = request.sampling._replace(temperature=temperature, presence_penalty=1.0, logit_bias=((3, 9.0),))
    await check_scored(engine, replace(request, sampling=sampling), weights[0])


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
async def test_around_new_weights_they_are_of_one_version(
    engine: SglangEngine | Pool, weights: dict[int, Path], mode: PauseMode
) -> None:
    gate, prompt = AdminGate(engine), tokens(60, 400)
    before = await check_scored(engine, scoring(prompt, 350), weights[0])
    running = [asyncio.create_task(scored(engine, scoring(prompt + tokens(n, 300), 1))) for n in range(4)]
    await gate.admin.update_weights(str(weights[1]), before.version + 1, mode)
    for number, chunk in enumerate(await asyncio.gather(*running)):
        ids = prompt + tokens(number, 300)
        check_logprobs(
            {before.version: weights[0], before.version + 1: weights[1]},
            *(ids[:1], ids[1:], chunk.prompt_logprobs or (), [chunk.version] * (len(ids) - 1)),
        )
    assert (await check_scored(engine, scoring(prompt, 350), weights[1])).version == before.version + 1
    await gate.admin.update_weights(str(weights[0]), before.version + 2, PauseMode.ABORT)
    await check_scored(engine, scoring(prompt, 1, 1), weights[0])


async def test_too_long_a_prompt_is_refused(engine: SglangEngine | Pool) -> None:
    with pytest.raises(InvalidRequest):
        await scored(engine, scoring(tokens(70, engine.info().context_length + 1)))


async def test_after_images_they_are_of_what_the_model_sees(tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    build_tiny_vision_model(tmp_path / "model", VisionKind.QWEN3_VL, seed=0)
    vocabulary = json.loads((tmp_path / "model/config.json").read_text())["text_config"]["vocab_size"]
    server = Server(tmp_path / "model", tmp_path / "log")
    try:
        await asyncio.to_thread(server.wait_ready)
        async with seeing(server, tmp_path / "model", vocabulary) as pool:
            await check_scored_after_images(pool, tmp_path / "model", 1e-3)
    finally:
        server.kill()
