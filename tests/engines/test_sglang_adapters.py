"""The real SGLang with LoRA adapters, embedded and as a server: each token has the logprob that PEFT computes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from proxy.engine.contract import CollectedReply, request_for
from proxy.engine.interface import AdapterEngine, AdapterSource, Capability, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.remote import AdapterLost
from proxy.engine.sglang.engine import SglangEngine
from proxy.settings import Settings
from proxy.types import ids_of
from tests.adapters import adapter_logprobs, write_adapter
from tests.engines.devices import CPU_ARGUMENTS
from tests.engines.engine_process import EngineProcess, pool_of
from tests.engines.gates import AdminGate
from tests.engines.test_sglang_server import ARGUMENTS
from tests.support import until
from tokengrove.errors import EngineUnavailable, InvalidRequest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

TOLERANCE = 1e-4
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
LORA = (
    *("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", *MODULES),
    *("--lora-backend", "torch_native", "--max-loras-per-batch", "8"),
)
EMBEDDED_LORA = (
    *("enable_lora=true", "max_lora_rank=8", 'lora_target_modules=["q_proj","k_proj","v_proj","o_proj"]'),
    *("lora_backend=torch_native", "max_loras_per_batch=8"),
)


@pytest.fixture(scope="module")
def adapters(weights: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Adapters by version; 9 has too large a rank."""
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    folders = {version: tmp_path_factory.mktemp(f"adapter-{version}") for version in (1, 2, 3, 4, 9)}
    for version, folder in folders.items():
        write_adapter(weights[0], folder, version, r=64 if version == 9 else 4)
    return folders


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def embedded(weights: dict[int, Path], adapters: dict[int, Path]) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(Settings(engine_arg=(*CPU_ARGUMENTS, *EMBEDDED_LORA)), weights[0])
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(scope="module")
def server(
    weights: dict[int, Path], adapters: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(weights[0]), *ARGUMENTS, *LORA]
    log = tmp_path_factory.mktemp("server") / "log"
    started = EngineProcess(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log, "/model_info")
    started.wait_ready()
    yield started
    started.kill()


def asking(version: int | None, number: int, tokens: int = 60, *, stream: bool = True) -> GenerateRequest:
    prompt = ids_of(range(40 + number % 5, 60))
    request = replace(request_for(prompt, tokens, temperature=1.0), session_id=f"s{number}", adapter=version)
    return replace(request, whole=not stream)


def check(model: Path, adapters: dict[int, Path], request: GenerateRequest, reply: CollectedReply) -> None:
    """Assert that all tokens have the version that was asked for, and the logprobs of its adapter."""
    version = request.adapter
    assert set(reply.versions) == {version or 0} and len(reply.ids) == request.sampling.max_tokens
    expected = adapter_logprobs(model, None if version is None else adapters[version], request.input_ids, reply.ids)
    assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def check_serving(engine: AdapterEngine, gate: AdminGate, model: Path, adapters: dict[int, Path]) -> None:
    """Three versions serve while a fourth is loaded; then one prompt is sampled with each version."""
    assert Capability.ADAPTERS in gate.info().capabilities
    for version in (1, 2, 3):
        await engine.load_adapter(version, AdapterSource(str(adapters[version])))
    requests = [asking((1, 2, 3, None)[n % 4], n, 200, stream=n % 3 > 0) for n in range(16)]
    running = [asyncio.create_task(gate.read(request)) for request in requests]
    await until(lambda: sum(len(flight.output) for flight in gate._flights) > 100)
    loading = asyncio.create_task(engine.load_adapter(4, AdapterSource(str(adapters[4]))))
    while not loading.done():  # replies run for as long as it takes
        requests.append(asking((1, 2, 3, None)[len(requests) % 4], len(requests), 20))
        running.append(asyncio.create_task(gate.read(requests[-1])))
        await asyncio.wait({loading, running[-1]}, return_when=asyncio.FIRST_COMPLETED)
    await loading
    later = [asking(4, 100 + n) for n in range(4)]
    running += [asyncio.create_task(gate.read(request)) for request in later]
    for request, reply in zip(requests + later, await asyncio.gather(*running), strict=True):
        check(model, adapters, request, reply)
    for version in (1, 2, 3, 4, None):  # one prompt: no prefix may be shared
        request = asking(version, 7)
        check(model, adapters, request, await gate.read(request))
    for version in (1, 2, 3, 4):
        await engine.unload_adapter(version)
    with pytest.raises(EngineUnavailable, match="adapter version 2 is not loaded"):
        await gate.read(asking(2, 0))


async def test_embedded_logprobs_while_three_versions_serve_and_a_fourth_is_loaded(
    embedded: SglangEngine, weights: dict[int, Path], adapters: dict[int, Path]
) -> None:
    await check_serving(embedded, AdminGate(embedded), weights[0], adapters)


async def test_the_embedded_engine_refuses_what_does_not_fit(embedded: SglangEngine, adapters: dict[int, Path]) -> None:
    with pytest.raises(InvalidRequest, match="rank"):
        await embedded.load_adapter(9, AdapterSource(str(adapters[9])))
    with pytest.raises(InvalidRequest, match="not a LoRA adapter"):
        await embedded.load_adapter(8, AdapterSource(str(adapters[9].parent)))
    for _ in range(2):
        await embedded.load_adapter(1, AdapterSource(str(adapters[1])))
    with pytest.raises(InvalidRequest, match="another version"):
        await embedded.load_adapter(1, AdapterSource(str(adapters[2])))
    await embedded.unload_adapter(1)
    await embedded.unload_adapter(1)


async def test_server_logprobs_while_three_versions_serve_and_a_fourth_is_loaded(
    server: EngineProcess, weights: dict[int, Path], adapters: dict[int, Path]
) -> None:
    async with pool_of(server.url) as pool:
        await check_serving(pool, AdminGate(pool), weights[0], adapters)


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.ABORT, PauseMode.RETRACT])
async def test_an_adapter_is_loaded_during_a_pause(
    server: EngineProcess, weights: dict[int, Path], adapters: dict[int, Path], mode: PauseMode
) -> None:
    async with pool_of(server.url) as pool:
        gate = AdminGate(pool)
        await pool.load_adapter(1, AdapterSource(str(adapters[1])))
        before = asking(1, 1, 400)
        running = asyncio.create_task(gate.read(before))
        await until(lambda: sum(len(flight.output) for flight in gate._flights) > 20)
        await gate.admin.pause(mode)
        await pool.load_adapter(3, AdapterSource(str(adapters[3])))
        await gate.admin.resume()
        after = asking(3, 2)
        check(weights[0], adapters, after, await gate.read(after))
        check(weights[0], adapters, before, await running)
        for version in (1, 3):
            await pool.unload_adapter(version)


async def test_refusals_of_the_real_server(server: EngineProcess, adapters: dict[int, Path], tmp_path: Path) -> None:
    engine = await connect(640, None)(server.url)
    with pytest.raises(InvalidRequest, match="rank"):
        await engine.load_adapter("tokengrove-v9-x", AdapterSource(str(adapters[9])))
    with pytest.raises(InvalidRequest, match=str(tmp_path)):
        await engine.load_adapter("tokengrove-v8-x", AdapterSource(str(tmp_path)))
    for _ in range(2):
        await engine.load_adapter("tokengrove-v1-x", AdapterSource(str(adapters[1])))
    assert "tokengrove-v1-x" in await engine.adapters()
    for _ in range(2):
        await engine.unload_adapter("tokengrove-v1-x")
    for stream in (True, False):
        with pytest.raises(AdapterLost):
            named = replace(asking(7, 0, stream=stream), adapter_name="tokengrove-v7-x")
            await engine.sample(named, lambda chunk: None)
    await engine.close()
