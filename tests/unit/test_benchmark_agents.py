"""The agents of the benchmark, in front of the fake engine itself."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from benchmarks.client import Address, Load, Played
from benchmarks.engine import application
from benchmarks.model import Model, write_model
from benchmarks.scoring import Sampled, count_breaks
from benchmarks.sessions import KINDS, Session, workload

EVENT = {"choices": [{"index": 0, "delta": {"content": "#0.0.0 so"}, "finish_reason": None}]}


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[TestServer]:
    write_model(tmp_path / "model")
    async with TestServer(application(Model(tmp_path / "model"))) as server:
        yield server


def sessions(turns: int, *kinds: str) -> list[Session]:
    return [replace(one, shape=one.shape.first(turns)) for one in workload(1, kinds=kinds or KINDS)]


async def play(server: TestServer, played: list[Session], **more: Any) -> Played:
    async def open_session(http: aiohttp.ClientSession, session: int) -> Address:
        return Address(str(server.make_url("/v1/chat/completions")))

    return await Load(open_session, **more).play(played)


async def log(server: TestServer) -> list[Any]:
    async with aiohttp.ClientSession() as http, http.get(server.make_url("/bench/log")) as response:
        found: list[Any] = await response.json()
    return found


async def test_agents_play_every_shape_and_know_which_turn_continues_which(engine: TestServer) -> None:
    shapes = sessions(4, *KINDS, "images")
    played = await play(engine, shapes)
    assert played.failures == [] and len(played.read) == sum(len(one.shape.turns) for one in shapes)
    logged = await log(engine)
    assert played.seen == {(entry["session"], entry["turn"], entry["attempt"]) for entry in logged}
    continuing = sum(turn.parent is not None for one in shapes for turn in one.shape.turns)
    assert count_breaks([Sampled.of(entry) for entry in logged], played.continued) == (continuing, continuing)


async def test_the_arrivals_of_a_stream_count_all_its_text(engine: TestServer) -> None:
    played = await play(engine, sessions(1, "forks"), stream=True)
    (logged,), (read,) = await log(engine), played.read
    assert read.arrivals[-1][1] == len(logged["content"]) <= logged["parts"][-1][2]


async def test_a_broken_connection_is_retried_and_the_session_opened_again() -> None:
    asked, opened = list[Any](), list[int]()

    async def answer(request: web.Request) -> web.Response:
        asked.append(await request.json())
        if len(asked) == 1:
            assert request.transport is not None
            request.transport.close()
        message = {"role": "assistant", "content": f"#{len(opened)}.0.0 so"}
        return web.json_response({"choices": [{"message": message}]})

    async def open_session(http: aiohttp.ClientSession, session: int) -> Address:
        opened.append(session)
        return Address(str(server.make_url("/")))

    async def retry() -> bool:
        return True

    app = web.Application()
    app.add_routes([web.post("/", answer)])
    async with TestServer(app) as server:
        played = await Load(open_session, stream=False, retry=retry).play(sessions(1, "images"))
    assert asked[0] == asked[1] and len(opened) == 2
    assert played.failures == [] and played.seen == {(2, 0, 0)}


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"data: " + json.dumps(EVENT).encode() + b"\n\n", "before its finish reason"),
        (b'data: {"error": {"message": "gone"}}\n\n', "error in a stream"),
        (b"data: " + json.dumps(EVENT).replace("#0.0.0", "#").replace("null", '"stop"').encode() + b"\n\n", "tag"),
    ],
)
async def test_a_stream_that_is_no_whole_answer_ends_the_session_with_the_reason(content: bytes, why: str) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=content, content_type="text/event-stream")

    app = web.Application()
    app.add_routes([web.post("/v1/chat/completions", answer)])
    async with TestServer(app) as server:
        played = await play(server, sessions(1, "images"), stream=True)
    assert played.read == [] and len(played.failures) == 1 and why in played.failures[0]
