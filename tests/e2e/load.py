"""Agents that send turn after turn to a server. They keep every reply that arrived whole, and every refusal."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from proxy.store.session_query import SessionQuery
from proxy.store.store import Store
from tests.e2e.processes import ROOT, run
from tests.support import user
from tokengrove.reasons import Status


class Refused(Exception):
    """The server answered 503."""


@dataclass
class Load:
    """`seen`: the text of each whole reply by id. `refusals`: the headers of each 503. `gone`: a connection was cut.

    `heard`: called at each whole reply.
    """

    chance: random.Random
    heard: Callable[[], None] = lambda: None
    seen: dict[str, str] = field(default_factory=dict)
    refusals: list[httpx.Headers] = field(default_factory=list)
    gone: bool = False
    stopped: bool = False

    async def talk(self, http: httpx.AsyncClient, session: str, *, stream: bool) -> None:
        """Send turn after turn until a connection is cut or `stopped` is set. A refused turn is sent again."""
        messages: list[Any] = [user(f"hello from {session}")]
        while not self.stopped:
            body = {"model": "m", "messages": messages, "max_tokens": self.chance.randint(1, 40), "stream": stream}
            try:
                turn = streamed if stream else unary
                reply_id, text = await turn(http, f"/{session}/v1/chat/completions", body, self.refusals)
            except Refused:
                await asyncio.sleep(0.05)
                continue
            except httpx.HTTPError:
                self.gone = True
                return
            self.seen[reply_id] = text
            self.heard()
            messages += [{"role": "assistant", "content": text}, user("go on")]

    async def until(self, condition: Any) -> None:
        """Wait until `condition()` holds. Raises AssertionError after two minutes."""
        for _ in range(2400):
            if condition():
                return
            await asyncio.sleep(0.05)
        raise AssertionError("the load did not meet the condition within two minutes")


async def unary(
    http: httpx.AsyncClient, path: str, body: Any, refusals: list[httpx.Headers] | None = None
) -> tuple[str, str]:
    """Send one turn; return the id and the text of its reply. Raises Refused for a 503."""
    response = await http.post(path, json=body)
    _check(response, refusals)
    reply = response.json()
    return reply["id"], reply["choices"][0]["message"]["content"]


async def streamed(
    http: httpx.AsyncClient, path: str, body: Any, refusals: list[httpx.Headers] | None = None
) -> tuple[str, str]:
    """Stream one turn; return its id and text.

    Raises Refused for a 503 or an error event, and httpx.ReadError unless the stream ended with `[DONE]`.
    """
    text, reply_id, done = "", "", False
    async with http.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            await response.aread()
        _check(response, refusals)
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise Refused(chunk["error"])
                reply_id = chunk["id"]
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    if not done:
        raise httpx.ReadError("cut")
    return reply_id, text


def _check(response: httpx.Response, refusals: list[httpx.Headers] | None) -> None:
    if response.status_code == 503 and refusals is not None:
        assert response.json()["error"]["message"]
        refusals.append(response.headers)
        raise Refused(response.text)
    assert response.status_code == 200, response.text


def check_database(url: str) -> str:
    """Return the output of `tokengrove db check`. Raises AssertionError if the check found anything."""
    done = run("db", "check", "--database-url", url, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


async def outputs_at(url: str) -> dict[str, str]:
    """The text of every complete interaction, by id."""
    store = await asyncio.to_thread(Store.open, url)
    try:
        outputs: dict[str, str] = {}
        for record in await store.recordings.find_sessions(SessionQuery()):
            for interaction in await store.recordings.load_interactions(record.session_id):
                if interaction.status is Status.COMPLETE:
                    assert len(interaction.output_ids) == len(interaction.logprobs)
                    outputs[interaction.id] = interaction.output.content
        return outputs
    finally:
        await store.close()


def sqlite_url(folder: Path) -> str:
    return f"sqlite:///{folder / 'served.db'}"
