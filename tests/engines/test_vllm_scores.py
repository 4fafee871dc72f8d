"""A real vLLM: logprobs of prompts are those of own forward passes, over both endpoints and in both logprobs modes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from proxy.engine.contract import request_for
from proxy.engine.interface import AdapterSource, Capability, PauseMode
from proxy.engine.servers.pool import Pool
from proxy.engine.tiny.vision import VisionKind
from tests.adapters import write_adapter
from tests.engines.engine_process import pool_of
from tests.engines.forward import check_logprobs, plain_logprobs
from tests.engines.gates import AdminGate
from tests.engines.scoring import check_scored, check_scored_after_images, scored, scoring, tokens
from tests.engines.test_sglang_server_images import seeing
from tests.engines.vllm_process import FULL, VARIABLE, VllmProcess, build_wide_model, build_wide_vision_model
from tokengrove.errors import InvalidRequest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

# More slots than adapters, as in test_vllm_adapters.
LORA = (
    *("--enable-lora", "--max-loras", "32", "--max-lora-rank", "8"),
    *("--lora-target-modules", "q_proj", "k_proj", "v_proj", "o_proj"),
)
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
CHUNKS = ("--max-num-batched-tokens", "256", "--enable-chunked-prefill")
"""Prompts are computed in parts of 256 tokens."""

SERVERS = {
    "generate": ("--logprobs-mode", "processed_logprobs", *FULL),
    "completions": ("--logprobs-mode", "raw_logprobs", "--enable-prompt-tokens-details"),
}
"""The flags of servers by the endpoint that is used of them."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} does not name the Python of an environment with vLLM")
    built = {version: tmp_path_factory.mktemp(f"wide-{version}") for version in range(2)}
    for version, folder in built.items():
        build_wide_model(folder, seed=version)
    return built


@pytest.fixture(scope="module")
def adapter(folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(folders[0], tmp_path_factory.mktemp("adapter"), 1)


@pytest.fixture(scope="module", params=SERVERS)
def server(
    request: pytest.FixtureRequest, folders: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmProcess]:
    log = tmp_path_factory.mktemp("log") / "log"
    started = VllmProcess(folders[0], log, *SERVERS[request.param], *LORA, *CHUNKS, environment=RUNTIME)
    started.wait_ready()
    yield started
    started.kill()


@pytest_asyncio.fixture(loop_scope="module")
async def pool(server: VllmProcess) -> AsyncIterator[Pool]:
    async with pool_of(server.url) as found:
        yield found


async def test_all_logprobs_of_a_prompt_are_those_of_a_forward_pass(pool: Pool, folders: dict[int, Path]) -> None:
    able = pool.info().capabilities
    assert Capability.PROMPT_LOGPROBS in able and Capability.PROMPT_TEMPERATURE not in able
    for number, (length, top) in enumerate([(1, 0), (2, 3), (60, 0), (60, 5), (60, 20), (700, 2)]):
        await check_scored(pool, scoring(tokens(number, length), 1, top), folders[0])


async def test_every_first_position_also_with_a_cached_prefix(pool: Pool, folders: dict[int, Path]) -> None:
    prompt = tokens(10, 90)
    await check_scored(pool, scoring(prompt[:70] + tokens(11, 10), 1, 2), folders[0])
    await AdminGate(pool).read(request_for(prompt, 8))
    for first in (1, 2, 69, 70, 71, 80, 89, 90):
        chunk = await check_scored(pool, scoring(prompt, first, first % 3), folders[0])
        assert not chunk.cached_tokens  # vLLM computes the whole prompt


async def test_prompts_are_scored_between_turns(pool: Pool, folders: dict[int, Path]) -> None:
    gate = AdminGate(pool)
    turns = [replace(request_for(tokens(20 + n, 40), 150), session_id=f"t{n}") for n in range(6)]
    running = [asyncio.create_task(gate.read(turn)) for turn in turns]
    shared = tokens(30, 40)
    asked = [scoring(shared + tokens(31 + n, 20 + 90 * n), 1 + 20 * n, n % 3) for n in range(6)]
    await asyncio.gather(*(check_scored(pool, request, folders[0]) for request in asked))
    for turn, reply in zip(turns, await asyncio.gather(*running), strict=True):
        assert len(reply.ids) == 150
        assert reply.logprobs == pytest.approx(plain_logprobs(folders[0], turn.input_ids, reply.ids), abs=1e-4)


async def test_with_an_adapter(pool: Pool, folders: dict[int, Path], adapter: Path) -> None:
    await pool.load_adapter(1, AdapterSource(str(adapter)))
    prompt = tokens(40, 300)
    for first in (1, 100, 299):
        with_adapter = await check_scored(pool, scoring(prompt, first, 2, adapter=1), folders[0], adapter)
        assert with_adapter.version == 1
        await check_scored(pool, scoring(prompt, first, 2), folders[0])
    await pool.unload_adapter(1)


@pytest.mark.parametrize("temperature", [0.0, 0.5, 2.0])
async def test_vllm_takes_no_temperature_for_them(pool: Pool, folders: dict[int, Path], temperature: float) -> None:
    request = scoring(tokens(50, 40), 5, 2)
    sampling = request.sampling._replace(temperature=temperature, presence_penalty=1.0, logit_bias=((3, 9.0),))
    await check_scored(pool, replace(request, sampling=sampling), folders[0])


async def test_too_many_alternatives_are_refused(pool: Pool) -> None:
    with pytest.raises(InvalidRequest, match="greater than max allowed: 20"):
        await scored(pool, scoring(tokens(60, 20), 5, 21))
    with pytest.raises(InvalidRequest):
        await scored(pool, scoring(tokens(70, 4097)))


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.ABORT])
async def test_around_new_weights_they_are_of_one_version(
    pool: Pool, folders: dict[int, Path], mode: PauseMode
) -> None:
    gate, prompt = AdminGate(pool), tokens(60, 400)
    before = await check_scored(pool, scoring(prompt, 350), folders[0])
    running = [asyncio.create_task(scored(pool, scoring(prompt + tokens(n, 300), 1))) for n in range(4)]
    await gate.admin.update_weights(str(folders[1]), before.version + 1, mode)
    for number, chunk in enumerate(await asyncio.gather(*running)):
        ids = prompt + tokens(number, 300)
        check_logprobs(
            {before.version: folders[0], before.version + 1: folders[1]},
            *(ids[:1], ids[1:], chunk.prompt_logprobs or (), [chunk.version] * (len(ids) - 1)),
        )
    assert (await check_scored(pool, scoring(prompt, 350), folders[1])).version == before.version + 1
    await gate.admin.update_weights(str(folders[0]), before.version + 2, PauseMode.ABORT)
    await check_scored(pool, scoring(prompt, 1, 1), folders[0])


async def test_after_images_they_are_of_what_the_model_sees(tmp_path: Path) -> None:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} does not name the Python of an environment with vLLM")
    build_wide_vision_model(tmp_path / "model", VisionKind.QWEN3_VL, 0)
    flags = ("--limit-mm-per-prompt", '{"image": 4, "video": 0}', *SERVERS["generate"])
    server = VllmProcess(tmp_path / "model", tmp_path / "log", *flags)
    try:
        await asyncio.to_thread(server.wait_ready)
        async with seeing(server, tmp_path / "model") as pool:
            await check_scored_after_images(pool, tmp_path / "model", 0.02)  # vLLM resizes with torchvision
    finally:
        server.kill()
