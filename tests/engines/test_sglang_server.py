"""A real `sglang.launch_server` over HTTP: the contract, weight updates, and a pool that loses two of three servers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from proxy.engine.contract import CHECKS, ContractCheck, check_grammars_are_followed, complete, request_for
from proxy.engine.interface import Capability, PauseMode
from proxy.engine.pauses import Pauses
from proxy.types import ids_of
from tests.engines.engine_process import EngineProcess, pool_of
from tests.engines.forward import check_logprobs, plain_logprobs
from tests.engines.gates import AdminGate
from tests.engines.pools import Notes
from tests.engines.updates import under_way, update_while_tokens_are_held_up
from tests.support import until

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

PROMPT = ids_of(range(40, 60))
ARGUMENTS = (
    *(
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--disable-cuda-graph",
    ),
    *("--dtype", "float32", "--max-total-tokens", "16384", "--context-length", "2048", "--max-running-requests", "32"),
    *("--log-level", "error", "--skip-server-warmup", "--weight-version", "0"),
)


class Server(EngineProcess):
    """An SGLang server process."""

    def __init__(self, folder: Path, log: Path, port: int | None = None) -> None:
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), *ARGUMENTS]
        # More threads of several servers would compete for the cores.
        super().__init__(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log, "/model_info", port)


@pytest.fixture(scope="module")
def server(weights: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    started = Server(weights[0], tmp_path_factory.mktemp("server") / "log")
    started.wait_ready()
    yield started
    started.kill()


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.IN_PLACE, PauseMode.RETRACT])
async def test_a_server_that_a_crash_left_paused_is_continued_by_the_next_pool(
    server: Server, weights: dict[int, Path], mode: PauseMode
) -> None:
    notes = Notes()
    async with pool_of(server.url, notes=notes) as pool:
        await pool.pause(mode)
        assert [note.url for note in await notes.noted()] == [server.url]
        for member in pool._members:  # closing it would continue it
            member.paused = False
        pool.pauses = Pauses()
    async with pool_of(server.url, notes=notes) as pool:
        assert not await notes.noted() and [shown["state"] for shown in pool.servers()] == ["alive"]
        reply = await complete(pool, request_for(PROMPT, 8))
        check_logprobs(weights, PROMPT, reply.ids, reply.logprobs, reply.versions)


async def more_tokens(gate: AdminGate, count: int) -> None:
    """Wait until the requests in flight have sampled `count` more tokens in all."""
    enough = count + sum(len(flight.output) for flight in gate._flights)
    await until(lambda: sum(len(flight.output) for flight in gate._flights) >= enough)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
async def test_contract(server: Server, check: ContractCheck) -> None:
    async with pool_of(server.url) as pool:
        await check(pool, PROMPT)


async def test_contract_of_grammars_and_reported_capabilities(server: Server, weights: dict[int, Path]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(weights[0])
    async with pool_of(server.url) as pool:
        info = pool.info()
        assert info.context_length == 2046 and Capability.GRAMMAR in info.capabilities
        await check_grammars_are_followed(
            pool, PROMPT, tokenizer.decode, [tokenizer.eos_token_id, tokenizer.pad_token_id]
        )


async def test_a_seed_is_taken_as_best_effort(server: Server) -> None:
    async with pool_of(server.url) as pool:
        assert Capability.SEED in pool.info().capabilities and Capability.DETERMINISTIC not in pool.info().capabilities
        assert len((await complete(pool, request_for(PROMPT, 3, seed=2**63 - 1))).ids) == 3


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT])
async def test_tokens_around_an_update_have_the_logprobs_of_their_versions(server, weights, mode) -> None:
    async with pool_of(server.url) as pool:
        gate = AdminGate(pool)
        crowd = await under_way(gate, AdminGate.read, weights[0], 8, 300)
        await gate.admin.update_weights(str(weights[1]), 1, mode)
        for prompt, reply in [(prompt, await coming) for prompt, coming in crowd]:
            assert len(reply.ids) == 300
            check_logprobs(weights, prompt, reply.ids, reply.logprobs, reply.versions)
        await gate.admin.update_weights(str(weights[0]), 0, PauseMode.DRAIN)


async def test_versions_of_tokens_delivered_after_an_update_are_corrected_at_the_end(server, weights) -> None:
    async with pool_of(server.url) as pool:
        gate = AdminGate(pool)
        crowd = await under_way(gate, AdminGate.read, weights[0], 6, 200)
        await update_while_tokens_are_held_up(gate, server.pid, weights[1], 1, PauseMode.RETRACT)
        for prompt, reply in [(prompt, await coming) for prompt, coming in crowd]:
            assert set(reply.versions) == {0, 1}
            check_logprobs(weights, prompt, reply.ids, reply.logprobs, reply.versions)
        await gate.admin.update_weights(str(weights[0]), 0, PauseMode.DRAIN)


async def test_killing_two_of_three_servers_loses_no_token(weights, tmp_path: Path) -> None:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    servers = [Server(weights[0], tmp_path / f"log-{number}") for number in range(3)]
    try:
        for started in servers:
            started.wait_ready()
        async with pool_of(*(started.url for started in servers)) as pool:
            await until(
                lambda: all(shown["state"] == "alive" for shown in pool.servers())
            )  # a busy server may join later
            gate = AdminGate(pool)
            prompts = [ids_of(range(n, n + 40)) for n in range(18)]
            running = [asyncio.create_task(gate.read(request_for(prompt, 400, 0.0))) for prompt in prompts]
            for victim in servers[:2]:
                await more_tokens(gate, 10 * len(prompts))
                victim.kill()
            replies = await asyncio.gather(*running)
            states = [shown["state"] for shown in pool.servers()]
            assert sorted(states) == ["alive", "ejected", "ejected"]
        for prompt, reply in zip(prompts, replies, strict=True):
            assert len(reply.ids) == 400
            assert reply.logprobs == pytest.approx(plain_logprobs(weights[0], prompt, reply.ids), abs=1e-4)
    finally:
        for started in servers:
            started.kill()
