"""Invariant 4, durable before done: kill -9 loses no reply whose end a client has seen."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.store.store import Store
from proxy.types import Status
from tests.e2e.processes import Process, server_process
from tests.support import user

SESSIONS = 32


class Seen:
    """What one client received whole: the reply's id and its text."""

    def __init__(self) -> None:
        self.replies: dict[str, str] = {}


async def talk(http: httpx.AsyncClient, session: str, seen: Seen, *, stream: bool) -> None:
    """Turn after turn, until the server is gone."""
    messages: list[Any] = [user(f"hello from {session}")]
    while True:
        body = {"model": "m", "messages": messages, "max_tokens": random.randint(1, 40), "stream": stream}
        try:
            reply_id, text = await (streamed if stream else unary)(http, f"/{session}/v1/chat/completions", body)
        except httpx.HTTPError:
            return
        seen.replies[reply_id] = text
        messages += [{"role": "assistant", "content": text}, user("go on")]


async def unary(http: httpx.AsyncClient, path: str, body: Any) -> tuple[str, str]:
    response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    return reply["id"], reply["choices"][0]["message"]["content"]


async def streamed(http: httpx.AsyncClient, path: str, body: Any) -> tuple[str, str]:
    """Raises httpx.ReadError unless the stream came to its `[DONE]`."""
    text, reply_id, done = "", "", False
    async with http.stream("POST", path, json=body) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                reply_id = chunk["id"]
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if not done:
        raise httpx.ReadError("cut")
    return reply_id, text


async def under_load_until_killed(process: Process, after_s: float) -> dict[str, str]:
    seen = Seen()
    limits = httpx.Limits(max_connections=SESSIONS)
    async with httpx.AsyncClient(base_url=process.url, timeout=60, limits=limits) as http:
        talks = [talk(http, f"s{number}", seen, stream=number % 2 == 0) for number in range(SESSIONS)]
        load = asyncio.gather(*talks)
        await asyncio.sleep(after_s)
        await asyncio.to_thread(process.kill)
        await load
    return seen.replies


@pytest.mark.parametrize("round_number", range(3))
def test_kill_9_under_load_loses_no_reply_that_was_received_whole(tmp_path: Path, round_number: int) -> None:
    flags = ("--engine", "scripted", "--engine-arg", "tokens=40", "--engine-arg", "chunk=4")
    with server_process(tmp_path, *flags) as process:
        seen = asyncio.run(under_load_until_killed(process, random.uniform(0.5, 2.0)))
    assert seen
    stored = asyncio.run(stored_outputs(tmp_path))
    assert {key: stored.get(key) for key in seen} == seen
    with server_process(tmp_path, *flags) as process:  # and it starts again, with everything
        body = {"filter": {"task_id": "s0"}, "layout": "individual"}
        exported = httpx.post(f"{process.url}/export_trajectories", json=body).json()
        assert {sample["interaction_id"] for sample in exported["samples"]} <= set(stored)


async def stored_outputs(folder: Path) -> dict[str, str]:
    store = await asyncio.to_thread(Store.open, f"sqlite:///{folder / 'served.db'}")
    try:
        outputs: dict[str, str] = {}
        for record in await store.find_sessions():
            for interaction in await store.load_interactions(record.session_id):
                if interaction.status is Status.COMPLETE:
                    assert len(interaction.output_ids) == len(interaction.logprobs)
                    outputs[interaction.id] = interaction.output.content
        return outputs
    finally:
        await store.close()


def test_sigterm_lets_running_turns_end_and_exits_0(tmp_path: Path) -> None:
    flags = (
        "--engine",
        "scripted",
        "--engine-arg",
        "tokens=20",
        "--engine-arg",
        "chunk=1",
        "--engine-arg",
        "delay_s=0.05",
    )
    with server_process(tmp_path, *flags) as process:
        text = asyncio.run(terminate_in_the_middle(process))
        assert process.wait() == 0
        assert "Traceback" not in process.output
    stored = asyncio.run(stored_outputs(tmp_path))
    assert list(stored.values()) == [text]


async def terminate_in_the_middle(process: Process) -> str:
    """The text of a streamed turn that ran when the signal came."""
    body = {"model": "m", "messages": [user("hi")], "stream": True}
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
        turn = asyncio.ensure_future(streamed(http, "/s/v1/chat/completions", body))
        await terminate_with_a_turn_in_flight(process, http)
        return (await turn)[1]


async def terminate_with_a_turn_in_flight(process: Process, http: httpx.AsyncClient) -> None:
    for _ in range(500):
        if "tokengrove_in_flight 1.0" in (await http.get("/metrics")).text:
            break
        await asyncio.sleep(0.02)
    process.terminate()


async def cut_by_the_signal(process: Process) -> httpx.Response:
    body = {"model": "m", "messages": [user("hi")]}
    async with httpx.AsyncClient(base_url=process.url, timeout=60) as http:
        turn = asyncio.ensure_future(http.post("/s/v1/chat/completions", json=body))
        await terminate_with_a_turn_in_flight(process, http)
        return await turn


def test_sigterm_waits_no_longer_than_it_is_told_and_records_what_it_cut(tmp_path: Path) -> None:
    flags = ("--engine", "scripted", "--engine-arg", "tokens=9000", "--engine-arg", "chunk=1")
    flags += ("--engine-arg", "delay_s=0.05", "--shutdown-timeout-s", "1")
    with server_process(tmp_path, *flags) as process:
        response = asyncio.run(cut_by_the_signal(process))  # uncut, the reply would take minutes
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_unavailable")
        assert process.wait() == 0
        assert "Traceback" not in process.output
    assert asyncio.run(stored_statuses(tmp_path)) == [Status.ABORTED]


async def stored_statuses(folder: Path) -> list[Status]:
    store = await asyncio.to_thread(Store.open, f"sqlite:///{folder / 'served.db'}")
    try:
        return [interaction.status for interaction in await store.load_interactions("s")]
    finally:
        await store.close()
