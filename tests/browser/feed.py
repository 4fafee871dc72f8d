"""A server in this process whose answers are given one by one; agents' requests fill its database."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import httpx

from proxy.app import build_app
from proxy.engine.chunks import TokenChunk
from proxy.engine.requests import GenerateRequest
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply
from proxy.rendering.renderer import Renderer
from proxy.settings import Settings
from proxy.types import Logprobs
from tests.support import JSON, Server, sampled, tiny_renderer


class Uncertain(ScriptedEngine):
    """A scripted engine that is surer of some tokens than of others. `chunks`: how many it has given."""

    chunks = 0

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Play the reply, with a logprob between 0 and -7 that depends on the token and its place."""
        at = len(request.prompt)
        async with contextlib.aclosing(super().generate(request)) as chunks:
            async for chunk in chunks:
                self.chunks += 1
                if len(chunk.ids) == len(chunk.logprobs):
                    known = Logprobs("f", [_logprob(token, at + place) for place, token in enumerate(chunk.ids)])
                    chunk = replace(chunk, logprobs=known)
                at += len(chunk.ids)
                yield chunk


def _logprob(token: int, place: int) -> float:
    return -7.0 * ((token * 7919 + place * 104_729) % 1009 / 1009) ** 4


class Feed:
    """Sends what agents and environments send. A reply is what the engine then says: a text, or a `Reply`."""

    def __init__(self, server: Server, engine: Uncertain, replies: deque[Reply]) -> None:
        self.server, self.engine, self._replies = server, engine, replies
        self._roots: dict[str, str] = {}

    async def start(self, session: str, **body: Any) -> None:
        """Start a session under this id. `body`: further fields of `/rl/start_session`."""
        started = await self.server.ok("/rl/start_session", {"session_id": session, "task_id": session, **body})
        self._roots[session] = started["root_url"].removeprefix(str(self.server.http.base_url))

    async def turn(
        self,
        session: str,
        messages: Sequence[Any],
        *replies: str | Reply,
        agent: str | None = None,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> dict[str, Any]:
        """Run a turn of chat completions; the answer of its first choice, to be sent back in the next turn."""
        response = await self.attempt(session, messages, *replies, agent=agent, headers=headers, **body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()["choices"][0]["message"]
        return answer

    async def attempt(
        self,
        session: str,
        messages: Sequence[Any],
        *replies: str | Reply,
        agent: str | None = None,
        headers: dict[str, str] | None = None,
        **body: Any,
    ) -> httpx.Response:
        """As `turn`; also for turns that fail."""
        self.will_say(*replies)
        root = self._roots.get(session) or f"/{quote(session)}"
        path = f"{root}/v1/chat/completions" if agent is None else f"{root}@{quote(agent, safe='')}/v1/chat/completions"
        return await self.server.post(path, {"model": "m", **body, "messages": list(messages)}, headers=headers or {})

    def will_say(self, *replies: str | Reply) -> None:
        """What the engine answers next."""
        for reply in replies:
            self._replies.append(Reply(sampled(reply), chunk=8) if isinstance(reply, str) else reply)

    async def call(self, session: str, what: str, **body: Any) -> Any:
        """POST to an endpoint of the session: `set_reward`, `mark`, `end_session`."""
        return await self.server.ok(f"/{quote(session)}/rl/{what}", body)

    async def weights(self, version: int) -> None:
        """Let the engine have this weight version from now on."""
        await self.server.ok("/engine/update_weights", {"path": f"/weights/{version}", "version": version})


@contextlib.asynccontextmanager
async def feeding(url: str, renderer: Renderer | None = None, **settings: Any) -> AsyncIterator[Feed]:
    """Run a server on the database at `url`, and a feed for it. Without `renderer`, the built-in model's."""
    configured = Settings(**{"database_url": url, "migrate": True, **settings})
    renderer = renderer or tiny_renderer(configured.thinking_retention)
    replies: deque[Reply] = deque()
    engine = Uncertain(lambda request: replies.popleft(), vocab_size=renderer.vocab_size, context_length=2**21)
    app = build_app(configured, engine=engine, renderer=renderer)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON, timeout=60)
    async with app.router.lifespan_context(app), client as http:
        yield Feed(Server(app, http, engine), engine, replies)
