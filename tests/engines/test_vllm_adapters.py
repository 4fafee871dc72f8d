"""A real vLLM with LoRA adapters: each token has the logprob of PEFT's own forward pass with its version's adapter."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.contract import CollectedReply, request_for
from proxy.engine.interface import AdapterSource, Capability, PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.kinds import connect
from proxy.engine.servers.remote import AdapterLost
from proxy.types import ids_of
from tests.adapters import adapter_logprobs, write_adapter
from tests.engines.engine_process import pool_of
from tests.engines.gates import AdminGate
from tests.engines.vllm_process import FULL, VARIABLE, VllmProcess, build_wide_model
from tests.support import until
from tokengrove.errors import EngineIncapable, EngineUnavailable, InvalidRequest

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

FLAGS = ("--logprobs-mode", "processed_logprobs", *FULL)
# More slots than adapters are ever loaded: on a CPU, vLLM applies the adapter of the last slot to rows of the base
# model (https://github.com/vllm-project/vllm/pull/48421), and frees no slot when an adapter is unloaded.
LORA = ("--enable-lora", "--max-loras", "32", "--max-lora-rank", "8")
RUNTIME = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
PROMPT = ids_of(range(40, 60))
# In a batch with a longer reply, vLLM's kernels for CPUs were off by 1e-3. Another adapter is off by more than 1.
TOLERANCE = 2e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} does not name the Python of an environment with vLLM")
    folder = tmp_path_factory.mktemp("wide")
    build_wide_model(folder, seed=0)
    return folder


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Adapters by version; 9 has too large a rank."""
    folders = {version: tmp_path_factory.mktemp(f"adapter-{version}") for version in (1, 2, 3, 4, 9)}
    for version, folder in folders.items():
        write_adapter(model, folder, version, r=64 if version == 9 else 4)
    return folders


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    started = VllmProcess(
        model,
        tmp_path_factory.mktemp("log") / "log",
        *FLAGS,
        *LORA,
        environment=RUNTIME,
    )
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
    folder = None if version is None else adapters[version]
    expected = adapter_logprobs(model, folder, request.input_ids, reply.ids)
    assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE)


async def test_logprobs_while_three_versions_serve_and_a_fourth_is_loaded(
    server: VllmProcess, model: Path, adapters: dict[int, Path]
) -> None:
    async with pool_of(server.url) as pool:
        assert Capability.ADAPTERS in pool.info().capabilities
        gate = AdminGate(pool)
        for version in (1, 2, 3):
            await pool.load_adapter(version, AdapterSource(str(adapters[version])))
        requests = [asking((1, 2, 3, None)[n % 4], n, 200, stream=n % 3 > 0) for n in range(16)]
        running = [asyncio.create_task(gate.read(request)) for request in requests]
        await until(lambda: sum(len(flight.output) for flight in gate._flights) > 100)
        loading = asyncio.create_task(pool.load_adapter(4, AdapterSource(str(adapters[4]))))
        while not loading.done():  # replies run for as long as it takes
            requests.append(asking((1, 2, 3, None)[len(requests) % 4], len(requests), 20))
            running.append(asyncio.create_task(gate.read(requests[-1])))
            await asyncio.wait({loading, running[-1]}, return_when=asyncio.FIRST_COMPLETED)
        await loading
        later = [asking(4, 100 + n) for n in range(4)]
        running += [asyncio.create_task(gate.read(request)) for request in later]
        for request, reply in zip(requests + later, await asyncio.gather(*running), strict=True):
            check(model, adapters, request, reply)
        again = [asking(version, 7) for version in (1, 2, 3, 4, None)]  # one prompt: no prefix may be shared
        for request in again:
            check(model, adapters, request, await gate.read(request))
        for version in (1, 2, 3, 4):
            await pool.unload_adapter(version)
        with pytest.raises(EngineUnavailable, match="adapter version 2 is not loaded"):
            await gate.read(asking(2, 0))


async def test_a_version_with_other_weights_shares_no_prefix_with_one_that_was_unloaded(
    server: VllmProcess, model: Path, adapters: dict[int, Path]
) -> None:
    for folder in (1, 2):
        async with pool_of(server.url) as pool:
            await pool.load_adapter(1, AdapterSource(str(adapters[folder])))
            request = asking(1, 0)
            check(model, {1: adapters[folder]}, request, await AdminGate(pool).read(request))
            await pool.unload_adapter(1)


async def test_refusals_of_the_real_server(server: VllmProcess, adapters: dict[int, Path], tmp_path: Path) -> None:
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
            named = replace(asking(1, 0, stream=stream), adapter_name="tokengrove-v1-x")
            await engine.sample(named, lambda chunk: None)
    await engine.close()


async def test_a_restarted_server_samples_with_the_adapter_again(
    server: VllmProcess, model: Path, adapters: dict[int, Path]
) -> None:
    async with pool_of(server.url) as pool:
        await pool.load_adapter(2, AdapterSource(str(adapters[2])))
        other = await connect(640, None)(server.url)
        await other.unload_adapter(pool._adapters.name_of(2))  # what a restart loses
        await other.close()
        request = asking(2, 3)
        check(model, adapters, request, await AdminGate(pool).read(request))


@pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.ABORT, PauseMode.RETRACT])
async def test_an_adapter_is_loaded_during_a_pause(
    server: VllmProcess, model: Path, adapters: dict[int, Path], mode: PauseMode
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
        check(model, adapters, after, await gate.read(after))
        check(model, adapters, before, await running)
        for version in (1, 3):
            await pool.unload_adapter(version)


async def test_a_request_that_a_kill_interrupts_ends_with_its_adapter_on_the_restarted_server(
    model: Path, adapters: dict[int, Path], tmp_path: Path
) -> None:
    first = VllmProcess(model, tmp_path / "log", *FLAGS, *LORA, environment=RUNTIME)
    second = None
    try:
        await asyncio.to_thread(first.wait_ready)
        async with pool_of(first.url) as pool:
            gate = AdminGate(pool, pause_timeout_s=300.0)
            for version in (1, 2):
                await pool.load_adapter(version, AdapterSource(str(adapters[version])))
            requests = [asking(version, n, 1000) for n, version in enumerate((1, 2, None))]
            running = [asyncio.create_task(gate.read(request)) for request in requests]
            await until(lambda: sum(len(flight.output) for flight in gate._flights) > 60)
            first.kill()
            second = VllmProcess(model, tmp_path / "log-2", *FLAGS, *LORA, environment=RUNTIME, port=first.port)
            await asyncio.to_thread(second.wait_ready)
            for request, reply in zip(requests, await asyncio.gather(*running), strict=True):
                check(model, adapters, request, reply)
    finally:
        (second or first).kill()


async def test_a_server_without_the_flags_names_them(model: Path, adapters: dict[int, Path], tmp_path: Path) -> None:
    plain = VllmProcess(model, tmp_path / "log", *FLAGS, dev_mode=False, environment=RUNTIME)
    try:
        plain.wait_ready()
        engine = await connect(640, None)(plain.url)
        with pytest.raises(EngineIncapable, match="--enable-lora"):
            await engine.load_adapter("tokengrove-v1-x", AdapterSource(str(adapters[1])))
        await engine.close()
    finally:
        plain.kill()
