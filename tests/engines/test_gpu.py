"""The two in-process engines on a GPU: contract, logprobs, prefix cache, weight updates in each mode, memory.

The model has an ordinary shape in bfloat16; the reference is a float32 forward pass of the same weights on the CPU.
Without CUDA all tests are skipped. `TOKENGROVE_TEST_DEVICE=cpu` runs them on the CPU, except for memory, which only a
GPU can release; so the tests themselves can be checked without a GPU. `TOKENGROVE_TEST_SGLANG_ARGUMENTS` has further
arguments of SGLang on a GPU, separated by spaces.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from proxy.engine.contract import (
    CHECKS,
    CollectedReply,
    ContractCheck,
    check_grammars_are_followed,
    complete,
    request_for,
)
from proxy.engine.interface import Capability, Engine, PauseMode
from proxy.settings import Settings
from proxy.types import Ids, ids_of
from tests.bench.models import Shape, write_model
from tests.engines.crowds import Growing, abort_after, converse, converse_all, leave_after
from tests.engines.devices import CPU_ARGUMENTS, CUDA_ARGUMENTS
from tests.engines.forward import check_logprobs, plain_logprobs
from tests.engines.gates import AdminGate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # SGLang raises many warnings
    pytest.mark.timeout(900),
]

PROMPT = ids_of(range(40, 60))
SHAPE = Shape(256, 2, 4, 2, 64, 512, 2048)  # heads of width 64, which attention kernels support
SPREAD = 0.15
"""Standard deviation of the weights: that of the logits is then 2.4 nats, so a wrong logprob is off by nats."""

TOLERANCE = 0.15
"""bfloat16 has 8 bits of precision: logits of up to 10 nats are off by some hundredths."""

LONG = 400


@pytest.fixture(scope="session")
def device() -> str:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    chosen = os.environ.get("TOKENGROVE_TEST_DEVICE", "cuda")
    if chosen == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA GPU is here; TOKENGROVE_TEST_DEVICE=cpu runs these tests on the CPU")
    return chosen


@pytest.fixture(scope="session")
def folders(device: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Folders with different weights of one model, by the version that tests give them."""
    made = {version: tmp_path_factory.mktemp(f"gpu-{version}") for version in range(2)}
    for version, folder in made.items():
        write_model(folder, SHAPE, "bfloat16", weights=True, seed=version, spread=SPREAD)
    return made


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def sglang(device: str, folders: dict[int, Path]) -> AsyncIterator[Engine]:
    pytest.importorskip("sglang", reason="sglang is not installed")
    from proxy.engine.sglang.engine import SglangEngine

    arguments = CUDA_ARGUMENTS if device == "cuda" else (*CPU_ARGUMENTS, "dtype=bfloat16")
    engine = SglangEngine(Settings(engine_arg=arguments), folders[0])
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def transformers(device: str, folders: dict[int, Path]) -> AsyncIterator[Engine]:
    from proxy.engine.transformers.engine import TransformersEngine

    settings = Settings(engine_arg=(f"device={device}",), max_context_tokens=8192)
    engine = TransformersEngine(settings, folders[0])
    await engine.start()
    yield engine
    await engine.close()


@pytest.fixture(params=["sglang", "transformers"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine, started once per session."""
    chosen: Engine = request.getfixturevalue(request.param)
    return chosen


@pytest.fixture
def gate(engine: Engine) -> AdminGate:
    return AdminGate(engine)


def check(folders: dict[int, Path], prompt: Ids, reply: CollectedReply) -> None:
    check_logprobs(folders, prompt, reply.ids, reply.logprobs, reply.versions, TOLERANCE)


async def use_first_weights(gate: AdminGate, folders: dict[int, Path]) -> None:
    await gate.admin.update_weights(str(folders[0]), 0, PauseMode.DRAIN)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(engine: Engine, check: ContractCheck) -> None:
    await check(engine, PROMPT)


async def test_contract_of_grammars(engine: Engine, folders: dict[int, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    ends = [tokenizer.eos_token_id, tokenizer.pad_token_id]
    await check_grammars_are_followed(engine, PROMPT, tokenizer.decode, ends)


async def test_it_runs_on_the_requested_device(engine: Engine, device: str) -> None:
    assert f" on {device}" in engine.info().detail


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
async def test_logprobs_equal_a_plain_forward_pass(
    gate: AdminGate, folders: dict[int, Path], temperature: float
) -> None:
    await use_first_weights(gate, folders)
    reply = await complete(gate.engine, request_for(PROMPT, 60, temperature))
    expected = plain_logprobs(folders[0], PROMPT, reply.ids, temperature)
    assert reply.logprobs == pytest.approx(expected, abs=TOLERANCE / (temperature or 1.0))


async def test_a_growing_session_reuses_its_prefix(engine: Engine) -> None:
    prompt, cached, lengths = ids_of(range(100, 250)), [], []
    await engine.flush_cache()
    for _ in range(3):
        chunks = [chunk async for chunk in engine.generate(request_for(prompt, 40))]
        cached.append(chunks[0].cached_tokens)
        lengths.append(len(prompt))
        prompt = ids_of([*prompt, *(token for chunk in chunks for token in chunk.ids), 11, 12, 13])
    assert cached[0] == 0
    assert all(now >= before - 32 for now, before in zip(cached[1:], lengths, strict=False))


async def test_concurrent_and_cancelled_sessions_keep_exact_logprobs(gate: AdminGate, folders: dict[int, Path]) -> None:
    await use_first_weights(gate, folders)
    prompts = [ids_of(range(n, n + 20)) for n in range(8)]
    sessions, aborted, _ = await asyncio.gather(
        converse_all(gate.engine, 32, temperature=1.0),
        asyncio.gather(*(abort_after(gate.engine, prompt, 1 + n, LONG) for n, prompt in enumerate(prompts))),
        asyncio.gather(*(leave_after(gate.engine, prompt, 1 + n, LONG) for n, prompt in enumerate(prompts))),
    )
    turns = [(turn.prompt, turn.reply) for session in sessions for turn in session]
    for prompt, reply in [*turns, *zip(prompts, aborted, strict=True)]:
        check(folders, prompt, CollectedReply(reply.ids, reply.logprobs, [0] * len(reply.ids)))
    assert len(await converse(gate.engine, Growing(99))) == 3


@pytest.mark.parametrize("mode", PauseMode)
async def test_tokens_around_an_update_have_the_logprobs_of_their_versions(
    gate: AdminGate, folders: dict[int, Path], mode: PauseMode
) -> None:
    await use_first_weights(gate, folders)
    prompts, begun = [ids_of(range(n, n + 30)) for n in range(6)], asyncio.Event()
    running = [asyncio.create_task(gate.read(request_for(prompt, LONG), begun)) for prompt in prompts]
    await begun.wait()
    assert await gate.admin.update_weights(str(folders[1]), 1, mode) == 1
    replies = await asyncio.gather(*running)
    for prompt, reply in zip(prompts, replies, strict=True):
        assert len(reply.ids) == LONG and reply.versions == sorted(reply.versions)
        check(folders, prompt, _exact_part(gate, reply, mode))
    mixed = sum(len(set(reply.versions)) == 2 for reply in replies)
    assert mixed == 0 if mode is PauseMode.DRAIN else mixed > 0
    await gate.admin.flush_cache()


def _exact_part(gate: AdminGate, reply: CollectedReply, mode: PauseMode) -> CollectedReply:
    """The part of the reply with exact logprobs: after an update in place, SGLang reads keys of the old weights."""
    exact = len(reply.ids)
    if mode is PauseMode.IN_PLACE and gate.info().name == "sglang":
        exact = reply.versions.count(0)
    return CollectedReply(reply.ids[:exact], reply.logprobs[:exact], reply.versions[:exact])


async def test_memory_is_released_and_resumed_while_a_request_waits(
    device: str, sglang: Engine, folders: dict[int, Path]
) -> None:
    if device != "cuda":
        pytest.skip("only a GPU's memory can be given back")
    gate = AdminGate(sglang)
    await use_first_weights(gate, folders)
    assert Capability.RELEASE_MEMORY in sglang.info().capabilities
    held = _free_bytes()
    begun = asyncio.Event()
    running = asyncio.create_task(gate.read(request_for(PROMPT, LONG), begun))
    await begun.wait()
    await gate.admin.release_memory((), PauseMode.ABORT)
    assert _free_bytes() - held > 2**30  # the cache alone is most of 0.4 of the GPU's memory
    await gate.admin.resume_memory(())
    reply = await running
    assert len(reply.ids) == LONG and abs(_free_bytes() - held) < 2**29
    check(folders, PROMPT, reply)


async def test_transformers_frees_the_memory_of_weights_and_cache_each_alone(
    device: str, transformers: Engine, folders: dict[int, Path]
) -> None:
    import torch

    gate, request = AdminGate(transformers), request_for(PROMPT, 64, temperature=0.0)
    await use_first_weights(gate, folders)
    before = await gate.read(request)
    if device != "cuda":
        pytest.skip("only a GPU's memory can be given back")
    held = torch.cuda.memory_allocated()
    weights = sum(path.stat().st_size for path in folders[0].glob("*.safetensors"))
    await gate.admin.release_memory(("weights",), PauseMode.ABORT)
    without_weights = torch.cuda.memory_allocated()
    assert held - without_weights > weights * 0.9
    await gate.admin.release_memory((), PauseMode.ABORT)
    cache = 8192 * 2 * 2 * 2 * 64 * 2  # tokens x layers x (key, value) x heads x width x bytes
    assert without_weights - torch.cuda.memory_allocated() >= cache
    await gate.admin.resume_memory(("kv_cache",))
    assert await gate.admin.update_weights(str(folders[0]), 0, PauseMode.ABORT) == 0
    await gate.admin.resume_memory(())
    assert torch.cuda.memory_allocated() == pytest.approx(held, rel=0.02)
    after = await gate.read(request)
    assert (after.ids, after.logprobs) == (before.ids, before.logprobs)
    check(folders, PROMPT, after)


def _free_bytes() -> int:
    import torch

    return int(torch.cuda.mem_get_info()[0])
