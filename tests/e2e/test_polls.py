"""Polls over real connections: a client that disconnects does not cancel its request, so the server must notice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.processes import server_process
from tests.support import user

CHAT = {"model": "m", "messages": [user("hi")]}
WAIT = {"wait_s": 60}


async def polling(http: httpx.AsyncClient, number: int) -> None:
    """Wait until the mailbox reports `number` waiting polls."""
    for _ in range(3000):
        state = (await http.get("/engine")).json()
        if f" {number} polls" in str(state):
            return
        await asyncio.sleep(0.01)
    raise AssertionError(state)


async def test_a_disconnected_poll_takes_no_request_from_a_waiting_one(tmp_path: Path) -> None:
    with server_process(tmp_path, "--engine", "mailbox") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as leaving:
                gone = asyncio.create_task(leaving.post("/mailbox/next", json=WAIT))
                await polling(http, 1)
                stays = asyncio.create_task(http.post("/mailbox/next", json=WAIT))
                await polling(http, 2)
                gone.cancel()
                await asyncio.gather(gone, return_exceptions=True)
            await polling(http, 1)
            agent = asyncio.create_task(http.post("/s/v1/chat/completions", json=CHAT))
            letter: dict[str, Any] = (await stays).json()
            assert letter["status"] == "request"
            answer = {"request_id": letter["request_id"], "text": "yes"}
            assert (await http.post("/mailbox/deliver", json=answer)).status_code == 200
            assert (await agent).json()["choices"][0]["message"]["content"] == "yes"
