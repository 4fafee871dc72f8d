"""A paused server over real connections: a client that disconnects leaves no turn, and a stop answers every client."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.load import check_database, sqlite_url
from tests.e2e.processes import Process, server_process
from tests.support import user

FLAGS = ("--engine", "scripted", "--engine-arg", "tokens=60", "--engine-arg", "chunk=1")
SLOW = ("--engine-arg", "delay_s=0.05")
CHAT = {"model": "m", "messages": [user("hi")]}
RAW = {"input_ids": [1, 2, 3]}
ASKED: list[tuple[str, Any]] = [("/s/v1/chat/completions", CHAT), ("/s/v1/generate", RAW), ("/v1/generate", RAW)]
FOREVER_S = "10000"


@contextlib.asynccontextmanager
async def paused(folder: Path, *flags: str) -> AsyncIterator[tuple[Process, httpx.AsyncClient]]:
    """Run a paused server that stays paused until a test continues it."""
    with server_process(folder, *FLAGS, "--pause-timeout-s", FOREVER_S, *flags) as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            assert (await http.post("/engine/pause_generation")).status_code == 200
            yield server, http


async def until_state(http: httpx.AsyncClient, holds: Callable[[Any], bool]) -> None:
    """Wait until `holds` is true of the state at `/engine`."""
    for _ in range(1000):
        state = (await http.get("/engine")).json()
        if holds(state):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(state)


async def test_clients_that_disconnect_from_a_paused_server_leave_no_turn(tmp_path: Path) -> None:
    async with paused(tmp_path) as (_, http):
        for count in (1, 2):
            async with httpx.AsyncClient(base_url=http.base_url, timeout=60) as leaving:
                asked = [asyncio.create_task(leaving.post(path, json=body)) for path, body in ASKED * count]
                await until_state(http, lambda state, n=3 * count: state["waiting"] == n)
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
            await until_state(http, lambda state: state["waiting"] == 0)
        assert (await http.post("/engine/continue_generation")).json()["in_flight"] == 0
        assert (await http.post(ASKED[0][0], json=CHAT)).status_code == 200
        nodes = (await http.get("/rl/sessions/s")).json()["interactions"]
        assert [(node["status"], node["reason"]) for node in nodes] == [("complete", "first")]


async def test_a_stop_during_a_pause_answers_waiting_clients_with_the_reason(tmp_path: Path) -> None:
    async with paused(tmp_path, "--shutdown-timeout-s", FOREVER_S) as (server, http):
        asked = [asyncio.create_task(http.post(path, json=body)) for path, body in ASKED]
        await until_state(http, lambda state: state["waiting"] == 3)
        server.terminate()
        for response in await asyncio.gather(*asked):
            assert response.status_code == 503 and int(response.headers["retry-after"]) > 0, response.text
            assert "shutting down" in response.json()["error"]["message"]
        assert await asyncio.to_thread(server.wait) == 0 and "Traceback" not in server.output, server.output
    check_database(sqlite_url(tmp_path))


async def test_a_stop_interrupts_requests_without_a_session_like_turns(tmp_path: Path) -> None:
    with server_process(tmp_path, *FLAGS, *SLOW, "--shutdown-timeout-s", "0.1") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
            asked = [asyncio.create_task(http.post(path, json=body)) for path, body in ASKED]
            await until_state(http, lambda state: state["in_flight"] == 3)
            server.terminate()
            for response in await asyncio.gather(*asked):
                assert response.status_code == 503, response.text
        assert await asyncio.to_thread(server.wait) == 0 and "Traceback" not in server.output, server.output
    check_database(sqlite_url(tmp_path))
