"""Real SGLang servers that sample other logprobs than the trainer computes: each is named, whatever is wrong with it.

The trainer is a forward pass of the policy's weights in float32, at temperature 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from proxy.app import build_app
from proxy.settings import Settings
from proxy.types import ids_of
from tests.engines.engine_process import EngineProcess
from tests.engines.forward import plain_logprobs
from tests.engines.test_sglang_server import ARGUMENTS
from tests.engines.wire import served
from tests.support import JSON, default_url, tiny_renderer, user
from tokengrove.client import AsyncClient, Sample

pytestmark = [
    pytest.mark.engines,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(600),
]
TURNS = 200


@pytest.fixture(scope="module")
def servers(weights: dict[int, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[EngineProcess]]:
    """A server of the policy's weights, and one of others under the same weight version."""
    pytest.importorskip("sglang", reason="sglang is not installed (tests/engines/requirements-sglang.txt)")
    found = []
    for version in (0, 1):
        command = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(weights[version]), *ARGUMENTS]
        log = tmp_path_factory.mktemp("server") / "log"
        found.append(EngineProcess(command, {**os.environ, "OMP_NUM_THREADS": "1"}, log, "/model_info"))
    for each in found:
        each.wait_ready()
    yield found
    for each in found:
        each.kill()


@contextlib.asynccontextmanager
async def relayed(url: str, factor: float) -> AsyncIterator[str]:
    """An address of the server at `url` that samples at `factor` times the temperature that it is asked for."""

    async def answer(request: Request) -> StreamingResponse:
        body = await request.body()
        if request.url.path == "/generate":
            asked = json.loads(body)
            asked["sampling_params"]["temperature"] *= factor
            body = json.dumps(asked).encode()
        headers = {name: value for name, value in request.headers.items() if name not in ("host", "content-length")}
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        found = await http.send(http.build_request(request.method, path, content=body, headers=headers), stream=True)
        kept = {name: found.headers[name] for name in ("content-type",) if name in found.headers}
        return StreamingResponse(found.aiter_bytes(), found.status_code, kept, BackgroundTask(found.aclose))

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["GET", "POST"])])
    async with httpx.AsyncClient(base_url=url, timeout=120.0, trust_env=False) as http, served(app) as address:
        yield address


async def test_a_wrong_temperature_and_stale_weights_are_named_within_200_turns(
    servers: list[EngineProcess], weights: dict[int, Path], tmp_path: Path
) -> None:
    good, stale = (each.url for each in servers)
    async with relayed(good, 1.4) as hot:
        settings = Settings(engine=f"{good},{hot},{stale}", database_url=default_url(tmp_path), migrate=True)
        app = build_app(settings, renderer=tiny_renderer())
        transport = httpx.ASGITransport(app=app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON, timeout=120.0) as http,
            AsyncClient(app=app) as client,
        ):
            await asyncio.gather(*[turn(http, at) for at in range(TURNS)])
            samples = (await client.export()).samples
            assert len(samples) == TURNS
            rows = [trained(weights[0], sample) for sample in samples]
            await client.annotate(samples, 0, {"logprobs": rows}, align="trained")
            found = await client.mismatch()
    by_server = {each["server"]: each for each in found["samplers"]}
    assert by_server.keys() == {good, hot, stale}
    assert min(each["turns"] for each in by_server.values()) > TURNS / 5
    assert {each["server"] for each in found["named"]} == {hot, stale}
    assert by_server[good]["largest_ratio"] == pytest.approx(1.0, abs=1e-3)


async def turn(http: httpx.AsyncClient, at: int) -> None:
    body = {"messages": [user(f"{at} hello")], "max_tokens": 16, "temperature": 1.0, "ignore_eos": True}
    reply = await http.post(f"/s{at}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    await http.post(f"/s{at}/rl/end_session", json={})


def trained(model: Path, sample: Sample) -> list[Any]:
    (entry,) = sample.turns
    start, end = entry["span"]
    ids = sample.input_ids.tolist()
    return plain_logprobs(model, ids_of(ids[:start]), ids[start:end])
