"""Routed experts of a real vLLM, against forward passes of the same weights.

Of vLLM for CPUs, versions 0.24 to 0.30 return experts. Later versions, and sampling masks in any version, need its
Model Runner V2, which needs a GPU: such a server does not start, and these tests are skipped. On a CPU no weights are
loaded into the running server: vLLM 0.30 reads those of experts wrongly. Up to 0.30, a reply may lose all its rows.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import request_for
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.pool import Pool
from proxy.side_columns.columns import EXPERTS, ColumnRequest
from proxy.side_columns.rows import SideColumn, spread
from proxy.types import ids_of
from tests.engines.engine_process import pool_of
from tests.engines.forward import routed_experts
from tests.engines.gates import AdminGate
from tests.engines.vllm_process import FULL, VARIABLE, VllmProcess, build_wide_moe_model
from tests.support import until
from tokengrove.options.start import Replay
from tokengrove.reasons import FinishReason

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(600),
]

PROMPT = ids_of(range(40, 60))
_K = 2
_NEEDS_GPU = "Model Runner V2"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if VARIABLE not in os.environ:
        pytest.skip(f"{VARIABLE} does not name the Python of an environment with vLLM")
    built = tmp_path_factory.mktemp("moe")
    build_wide_moe_model(built, seed=0)
    return built


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmProcess]:
    log = tmp_path_factory.mktemp("logs") / "experts"
    flags = ("--enable-return-routed-experts", "--logprobs-mode", "processed_logprobs")
    started = VllmProcess(folder, log, *flags, *FULL)
    try:
        started.wait_ready()
        yield started
    except AssertionError:
        if _NEEDS_GPU not in log.read_text(encoding="utf-8"):
            raise
        pytest.skip("this vLLM returns routed experts only on a GPU")
    finally:
        started.kill()


def wanting(prompt: Any, tokens: int, start: int, seed: int = 0) -> GenerateRequest:
    request = request_for(ids_of(prompt), tokens)
    columns = ColumnRequest(frozenset({Replay.EXPERTS}), start=start)
    sampling = request.sampling._replace(seed=seed, top_k=20, top_p=0.9)
    return replace(request, request_id=f"{start}-{seed}", sampling=sampling, columns=columns)


async def sampled(pool: Pool, request: GenerateRequest) -> tuple[list[int], SideColumn | None]:
    """The ids of the whole sequence, and its experts; None if vLLM lost them."""
    chunks: list[TokenChunk] = []
    await pool.sample(request, chunks.append)
    columns = [chunk.columns[EXPERTS] for chunk in chunks if chunk.columns]
    return [*request.input_ids, *(token for chunk in chunks for token in chunk.ids)], columns[0] if columns else None


def ascending(column: SideColumn) -> Any:
    return np.sort(column.rows.values, axis=-1)


async def test_experts_are_those_of_a_forward_pass_turn_by_turn(server: VllmProcess, folder: Path) -> None:
    async with pool_of(server.url) as pool:
        assert Replay.EXPERTS in pool.info().records and Replay.KEPT not in pool.info().records
        ids, start = list(PROMPT), 0
        for turn in range(3):
            ids, column = await sampled(pool, wanting(ids, 30, start, seed=turn))
            assert column is not None and (column.start, column.end) == (start, len(ids) - 1)
            assert (ascending(column) == routed_experts(folder, ids, _K)[start:-1]).all()
            start = len(ids) - 1
            ids += [70, 71, 72]


async def test_experts_of_requests_in_one_batch_and_of_cached_prefixes_are_those_of_a_forward_pass(
    server: VllmProcess, folder: Path
) -> None:
    async with pool_of(server.url) as pool:
        prompt = list(range(40, 240))  # several blocks of keys, which all requests share

        async def check(number: int) -> bool:
            request = wanting([*prompt, *range(number, number + 5)], 10 + 3 * number, 17 * number, seed=number)
            ids, column = await sampled(pool, request)
            if column is None:
                return False
            assert column.start == 17 * number
            assert (ascending(column) == routed_experts(folder, ids, _K)[column.start : -1]).all()
            return True

        assert sum(await asyncio.gather(*(check(number) for number in range(12)))) > 6


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.ABORT])
async def test_rows_across_a_pause_are_of_the_pass_of_their_sampling_or_missing(
    server: VllmProcess, folder: Path, mode: PauseMode
) -> None:
    """Up to 0.30, vLLM sends no rows of a reply that a pause aborts."""
    async with pool_of(server.url) as pool:
        gate = AdminGate(pool)
        found: list[TokenChunk] = []

        def take(chunk: TokenChunk) -> FinishReason | None:
            found.append(chunk)
            return None

        request = replace(wanting(PROMPT, 400, 0), whole=False)
        running = asyncio.create_task(gate.sample(request, take))
        await until(lambda: sum(len(chunk.ids) for chunk in found) >= 20)
        await gate.admin.pause(mode)
        assert not running.done()
        before = sum(len(chunk.ids) for chunk in found)
        await gate.admin.resume()
        await running
        ids = [*PROMPT, *(token for chunk in found for token in chunk.ids)]
        rows = spread([chunk.columns[EXPERTS] for chunk in found if chunk.columns], 0, len(ids) - 1)
        present = ~rows.missing
        lost = present[len(PROMPT) : len(PROMPT) + before - 1]
        assert present.sum() + len(lost) >= len(rows) and (mode is PauseMode.ABORT or present.all())
        expected = routed_experts(folder, ids, _K)[:-1]
        assert (np.sort(rows.values, axis=-1)[present] == expected[present]).all()
