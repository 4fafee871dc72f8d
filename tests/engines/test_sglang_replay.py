"""Side columns of the real SGLang, embedded and by URL: kept sets and experts are those of forward passes."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import pytest_asyncio

from proxy.engine.callbacks import sampler
from proxy.engine.chunks import TokenChunk
from proxy.engine.contract import request_for
from proxy.engine.expert_layers import expert_layers
from proxy.engine.interface import PauseMode
from proxy.engine.requests import GenerateRequest
from proxy.engine.servers.sglang_server import SglangServer
from proxy.engine.sglang.engine import SglangEngine
from proxy.settings import Settings
from proxy.side_columns.columns import ColumnRequest, Columns
from proxy.side_columns.rows import SideRows
from proxy.turns.column_log import ColumnLog
from proxy.types import Message, Role, SamplingParams, TurnRequest, ids_of
from tests.engines.devices import CPU_ARGUMENTS
from tests.engines.engine_process import EngineProcess
from tests.engines.gates import AdminGate
from tests.engines.replay_oracle import check_experts, check_kept, forward
from tests.engines.test_sglang_server import ARGUMENTS
from tests.mixtures import KINDS, build_mixture
from tests.support import until
from tokengrove.options.start import Replay

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]

PROMPT = ids_of(range(40, 60))
BOTH = frozenset({Replay.KEPT, Replay.EXPERTS})
SAMPLINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, top_k=5),
    SamplingParams(temperature=1.0, top_k=20),
    SamplingParams(temperature=0.7, top_k=50, top_p=0.8),
    SamplingParams(temperature=1.3, top_k=40, top_p=0.95, min_p=0.05),
    SamplingParams(temperature=1.0, top_k=1),
]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    with mock.patch.dict(KINDS["qwen3_moe"], mlp_only_layers=[]):  # SGLang 0.5.23 does not know dense layers of it
        return build_mixture(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sglang_engine(mixture: Path) -> AsyncIterator[SglangEngine]:
    engine = SglangEngine(Settings(engine_arg=CPU_ARGUMENTS, replay=("kept", "experts")), mixture)
    await engine.start()
    yield engine
    await engine.close()


class Server(EngineProcess):
    """An SGLang server that reports experts, and only new tokens in each part of a stream."""

    def __init__(self, folder: Path, log: Path) -> None:
        flags = ("--enable-return-routed-experts", "--incremental-streaming-output")
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(folder), *ARGUMENTS, *flags]
        super().__init__(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log, "/model_info")


@pytest.fixture(scope="module")
def dense_first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose first layer has no experts."""
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    return build_mixture(tmp_path_factory.mktemp("dense-first"), "glm4_moe")


@pytest.fixture(scope="module")
def server(dense_first: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(dense_first, tmp_path_factory.mktemp("server") / "log")
    started.wait_ready()
    yield started
    started.kill()


def recording(sampling: SamplingParams, tokens: int, start: int = 0, *, stream: bool = True) -> GenerateRequest:
    turn = None
    if not stream:
        turn = TurnRequest(api="chat", model="m", messages=(Message(Role.USER, "hi"),), sampling=SamplingParams())
    request = request_for(PROMPT, tokens)
    sampling = sampling._replace(max_tokens=tokens)
    return replace(request, sampling=sampling, turn=turn, columns=ColumnRequest(BOTH, 512, start))


class Recorded:
    """The tokens of a reply with their side columns, as a turn takes them."""

    def __init__(self, request: GenerateRequest) -> None:
        assert request.columns is not None
        self.log, self.request, self.ids = ColumnLog(request.columns, 0), request, list[int]()

    def take(self, chunk: TokenChunk) -> None:
        self.log.add(chunk, len(PROMPT) + len(self.ids))
        self.ids += chunk.ids

    def taken(self) -> tuple[Columns, Mapping[str, int]]:
        assert self.request.columns is not None
        start = self.request.columns.start
        return self.log.taken(start + 1 if start else 0, len(PROMPT), len(self.ids))

    def rows(self, name: str) -> SideRows:
        return self.taken()[0][name].rows

    @property
    def missing(self) -> dict[str, int]:
        return dict(self.taken()[1])

    def check(self, folder: Path) -> None:
        """Check the kept sets, and the experts of all tokens that have a row."""
        sampling, ids, experts = self.request.sampling, self.ids, self.rows("routed_experts")
        check_kept(folder, PROMPT, ids, self.rows("kept"), self.rows("kept_logprobs").values.tolist(), sampling)
        assert self.request.columns is not None
        start, whole = self.request.columns.start, forward(folder, (*PROMPT, *ids))
        present = np.flatnonzero(~experts.missing)
        passes = [whole._replace(experts=whole.experts[start:][present], sure=whole.sure[start:][present])]
        check_experts(passes, [0] * len(present), experts.values[present])


async def recorded(engine: Any, requests: Sequence[GenerateRequest]) -> list[Recorded]:
    replies = [Recorded(request) for request in requests]
    sample = sampler(engine)
    await asyncio.gather(*(sample(reply.request, reply.take) for reply in replies))
    return replies


async def test_rows_are_those_of_a_forward_pass(sglang_engine: SglangEngine, mixture: Path) -> None:
    for start in (0, 13):
        for reply in await recorded(sglang_engine, [recording(each, 24, start) for each in SAMPLINGS]):
            assert len(reply.ids) == 24 and not any(reply.missing.values())
            reply.check(mixture)


@pytest.mark.parametrize("stream", [True, False])
async def test_rows_of_a_server_are_those_of_a_forward_pass(server: Server, dense_first: Path, stream: bool) -> None:
    engine = SglangServer(server.url, 640, layers=expert_layers(dense_first))
    await engine.start()
    assert engine.info().why_unrecorded(Replay) is None
    for reply in await recorded(engine, [recording(each, 24, 13, stream=stream) for each in SAMPLINGS]):
        assert not any(reply.missing.values())
        reply.check(dense_first)
    await engine.close()


async def test_a_request_for_sets_that_sglang_does_not_report_runs_with_missing_rows(
    sglang_engine: SglangEngine, mixture: Path
) -> None:
    [reply] = await recorded(sglang_engine, [recording(SamplingParams(temperature=1.0, top_p=0.9), 8)])
    assert reply.missing == {"kept": 8, "kept_logprobs": 8, "routed_experts": 0}


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_rows_around_a_pause_are_right_or_missing(
    sglang_engine: SglangEngine, mixture: Path, mode: PauseMode
) -> None:
    gate = AdminGate(sglang_engine)
    replies = [Recorded(recording(SamplingParams(temperature=1.0, top_k=20), 120)) for _ in range(4)]
    running = [asyncio.create_task(gate.sample(reply.request, reply.take)) for reply in replies]
    await until(lambda: all(len(reply.ids) >= 20 for reply in replies))
    await gate.admin.pause(mode)
    await gate.admin.resume()
    await asyncio.gather(*running)
    for reply in replies:
        missing = reply.missing
        reply.check(mixture)
        if mode is PauseMode.RETRACT:
            assert 15 < missing.pop("routed_experts") < 115
        assert not any(missing.values())
