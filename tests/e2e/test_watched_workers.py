"""Whoever watches a server of two workers sees both of them, whichever answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import server_process
from tests.support import user

TWO = ("--workers", "2", "--engine", "scripted", "--migrate")
SESSIONS = [f"s{number}" for number in range(12)]
"""Each is called over a connection of its own: with so many, either worker gets some of them."""


async def fresh(url: str, method: str, path: str, **more: Any) -> Any:
    """A request over a connection of its own, which any worker may get."""
    async with httpx.AsyncClient(base_url=url, timeout=60) as http:
        response = await http.request(method, path, **more)
        assert response.status_code == 200, response.text
        return response.json()


async def end(url: str, session: str) -> None:
    body = {"model": "m", "max_tokens": 4, "messages": [user("hi")]}
    await fresh(url, "POST", f"/{session}/v1/chat/completions", json=body)
    await fresh(url, "POST", f"/{session}/rl/end_session", json={"reward": 1.0})


async def heard(url: str, begun: asyncio.Event) -> None:
    """Listen until all SESSIONS were told."""
    left = set(SESSIONS)
    async with httpx.AsyncClient(base_url=url, timeout=60) as http, http.stream("GET", "/rl/events") as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: "):
                begun.set()  # the first statistics were told, so changes are remembered
                left -= {name for name in left if f'"{name}"' in line}
            if not left:
                return
    raise AssertionError(f"never told: {left}")


async def test_changes_and_counts_of_both_workers_are_told_by_either(tmp_path: Path, postgres_url: str) -> None:
    with server_process(tmp_path, *TWO, database_url=postgres_url) as server:
        await until_both_answer(server.url)
        begun = [asyncio.Event() for _ in range(4)]
        listening = [asyncio.create_task(heard(server.url, event)) for event in begun]
        await asyncio.gather(*(event.wait() for event in begun))
        for session in SESSIONS:
            await end(server.url, session)
        await asyncio.gather(*listening)
        for _ in range(6):
            said = await until_counted(server.url)
            assert said["session_counts"]["started"] == len(SESSIONS)
            assert said["first_token_s"]["count"] == len(SESSIONS)
        await until_sampled(server.url)


async def until_both_answer(url: str) -> None:
    for _ in range(600):
        if (await fresh(url, "GET", "/rl/statistics"))["processes"] == 2:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("a worker is missing")


async def until_counted(url: str) -> Any:
    """What any worker says, once it is younger than the turns: an answer may be a second old."""
    for _ in range(200):
        said = await fresh(url, "GET", "/rl/statistics")
        if said["turns"]["complete"] == len(SESSIONS):
            return said
        await asyncio.sleep(0.05)
    raise AssertionError(said["turns"])


async def until_sampled(url: str) -> None:
    """Wait until the history, too, has the turns of both workers: a sample takes five seconds."""
    for _ in range(400):
        history = (await fresh(url, "GET", "/rl/statistics"))["history"]
        if round(sum(history["turns_per_s"]) * history["every_s"]) == len(SESSIONS):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(history)
