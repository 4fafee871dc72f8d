"""A stream breaks between an agent and the server. The SDK or the agent asks again, and the turn is sampled once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

import proxy.turns.turns
from tests.relays import Relay
from tests.support import real_server, user

ADMIN_KEY = "the-key-of-the-administrator"
ADMIN = {"authorization": f"Bearer {ADMIN_KEY}"}
Ask = Callable[[str, dict[str, str]], Awaitable[str]]
"""Streams one turn below a base URL with more headers, and returns its text. Raises if the stream breaks."""


async def chat(base: str, headers: dict[str, str]) -> str:
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        stream = await client.chat.completions.create(
            model="m",
            messages=[user("hi")],
            stream=True,
            extra_headers=headers,  # type: ignore[list-item]
        )
        parts = [chunk.choices[0] async for chunk in stream]
    assert parts[-1].finish_reason, "the stream ended early"
    return "".join(part.delta.content or "" for part in parts)


async def responses(base: str, headers: dict[str, str]) -> str:
    async with openai.AsyncOpenAI(base_url=base, api_key="any") as client:
        stream = await client.responses.create(model="m", input="hi", stream=True, extra_headers=headers)
        events = [event async for event in stream]
    assert events[-1].type in ("response.completed", "response.incomplete"), "the stream ended early"
    return "".join(event.delta for event in events if event.type == "response.output_text.delta")


async def messages(base: str, headers: dict[str, str]) -> str:
    async with anthropic.AsyncAnthropic(base_url=base.removesuffix("/v1"), api_key="any") as client:
        stream = await client.messages.create(
            model="m",
            max_tokens=100,
            messages=[user("hi")],  # type: ignore[list-item]
            stream=True,
            extra_headers=headers,
        )
        events = [event async for event in stream]
    assert events[-1].type == "message_stop", "the stream ended early"
    deltas = [event.delta for event in events if event.type == "content_block_delta"]
    return "".join(getattr(delta, "text", "") for delta in deltas)


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn that no agent elsewhere has begun ends at once without its client."""
    monkeypatch.setattr(proxy.turns.turns, "GRACE_S", 0.0)


APIS = pytest.mark.parametrize("ask", [chat, responses, messages])


class Far:
    """A session of a server behind a relay. `base`: its address for the agent."""

    def __init__(self, relay: Relay, url: str, started: dict[str, Any]) -> None:
        self.relay, self._url, self._session = relay, url, started["session_id"]
        self.base = f"{relay.url}{httpx.URL(started['base_url']).path}"

    async def tree(self) -> list[Any]:
        async with httpx.AsyncClient() as http:
            shown = await http.get(f"{self._url}/rl/sessions/{self._session}", headers=ADMIN)
        return list(shown.json()["interactions"])

    async def until_ended(self) -> None:
        """Wait until the turn is recorded."""
        for _ in range(3000):
            tree = await self.tree()
            if tree and tree[0]["status"] == "complete":
                return
            await asyncio.sleep(0.01)
        raise AssertionError("the turn did not end")


@asynccontextmanager
async def far(folder: Path, tokens: int = 30, delay_s: float = 0.03) -> AsyncIterator[Far]:
    """A server that samples slowly, so that a stream can break in its middle."""
    slow = ("play=babble", "chunk=1", f"tokens={tokens}", f"delay_s={delay_s}")
    with real_server(folder, admin_key=ADMIN_KEY, agent_port=0, engine_arg=slow) as url:
        async with httpx.AsyncClient() as http:
            started = (await http.post(f"{url}/rl/start_session", json={"task_id": "t"}, headers=ADMIN)).json()
        port = httpx.URL(started["base_url"]).port
        assert port is not None
        async with Relay(port).running() as relay:
            yield Far(relay, url, started)


def cut_once(relay: Relay, events: int = 8) -> None:
    """Let the relay cut the first connection after so many events."""
    relay.cut = lambda sent: relay.cuts == 0 and sent.count(b"\n\n") > events


async def broken(ask: Ask, base: str, headers: dict[str, str]) -> None:
    """Ask, and lose the stream in its middle."""
    try:
        await ask(base, headers)
    except (openai.APIStatusError, anthropic.APIStatusError):
        raise
    except Exception:  # each SDK has errors of its own for a stream that breaks
        return
    raise AssertionError("the stream did not break")


@APIS
async def test_an_sdk_that_gets_no_answer_asks_again_by_itself_and_joins_the_turn(tmp_path: Path, ask: Ask) -> None:
    async with far(tmp_path) as server:
        server.relay.cut = lambda sent: server.relay.cuts == 0
        assert await ask(server.base, {})
        assert (server.relay.cuts, server.relay.count) == (1, 2)
        assert [turn["status"] for turn in await server.tree()] == ["complete"]


@APIS
@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("headers", [{}, {"idempotency-key": "turn-1"}, {"x-stainless-retry-count": "1"}], ids=str)
async def test_an_agent_that_asks_again_gets_the_stream_from_its_beginning_sampled_once(
    tmp_path: Path, ask: Ask, ended: bool, headers: dict[str, str]
) -> None:
    """`ended`: it comes back after the turn has ended, which goes on without it."""
    async with far(tmp_path) as server:
        cut_once(server.relay)
        await broken(ask, server.base, headers if "idempotency-key" in headers else {})
        assert server.relay.cuts == 1
        if ended:
            await server.until_ended()
        again = await ask(server.base, headers)
        tree = await server.tree()
        assert [turn["status"] for turn in tree] == ["complete"]
        assert await ask(server.base, {"x-stainless-retry-count": "1"}) == again
        assert len(await server.tree()) == 1


@APIS
async def test_a_whole_reply_that_a_tunnel_lost_is_told_from_a_second_sample_by_a_mark(
    tmp_path: Path, ask: Ask
) -> None:
    """The tunnel had received all of it, so only the agent knows that it is the same turn."""
    async with far(tmp_path, tokens=5, delay_s=0.0) as server:
        mark = {"idempotency-key": "turn-1"}
        first = await ask(server.base, mark)
        assert await ask(server.base, mark) == first and len(await server.tree()) == 1
        assert await ask(server.base, {"idempotency-key": "turn-2"}) and len(await server.tree()) == 2
        assert await ask(server.base, {}) and len(await server.tree()) == 3
