"""Helpers that tests share: an app on the scripted engine, messages of a conversation, and scripted replies."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import httpx
import pytest

from proxy.api.turn_routes import App
from proxy.app import build_app
from proxy.engine.create import model_folder
from proxy.engine.scripted.engine import ScriptedEngine
from proxy.engine.scripted.scripts import Reply, Script, play
from proxy.rendering.renderer import Renderer, load_renderer
from proxy.serving import server
from proxy.settings import Settings
from proxy.store import schema
from proxy.types import Ids, ids_of
from tests import databases, impatience  # noqa: F401 (servers stop at once)

if TYPE_CHECKING:
    import pytest


JSON = {"content-type": "application/json"}
"""The header of a request with a body."""


@cache
def tiny_renderer(thinking_retention: str = "all") -> Renderer:
    """Return the renderer of the built-in model."""
    return load_renderer(Settings(thinking_retention=thinking_retention), model_folder(Settings()))


def sampled(text: str, *, end: bool = True) -> Ids:
    """Return the token ids of `text` as the built-in model would sample them, with its end token."""
    renderer = tiny_renderer()
    return renderer.encode(text) + (ids_of([renderer.stop_token_ids[0]]) if end else ids_of())


def says(*texts: str) -> Script:
    """Make a script of whole answers, in order."""
    return play([Reply(sampled(text)) for text in texts])


def call_text(name: str, arguments: str) -> str:
    """Return a tool call as the built-in model samples it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def free_port() -> int:
    """A local port on which nothing listens now.

    It is below those that systems give to outgoing connections, one of which could have it before a server has started.
    """
    while True:
        port = 10_000 + secrets.randbelow(20_000)  # of its own randomness: all workers have equal seeds
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


async def until(condition: Callable[[], bool]) -> None:
    """Wait until `condition()` holds. Raises AssertionError after a minute."""
    for _ in range(6000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition was not met within a minute")


async def let_pass(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the event loop's clock and run everything that is due by then."""
    loop = asyncio.get_running_loop()
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + seconds)
    for _ in range(10):
        await asyncio.sleep(0)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


def tool_result(call_id: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def function_tool(name: str, properties: dict[str, Any] | None = None) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties or {}, "required": list(properties or {})}
    return {"type": "function", "function": {"name": name, "description": f"does {name}", "parameters": parameters}}


@dataclass
class Server:
    """A running app, its HTTP client and its engine."""

    app: App
    http: httpx.AsyncClient
    engine: ScriptedEngine

    async def post(self, path: str, body: Any, **more: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **more)

    async def ok(self, path: str, body: Any, **more: Any) -> Any:
        response = await self.post(path, body, **more)
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, messages: Sequence[Any], session: str = "s", **more: Any) -> Any:
        """Run one unary turn; return the reply's body."""
        body = {"model": "m", "messages": list(messages), **more}
        return await self.ok(f"/{session}/v1/chat/completions", body)

    async def answer(self, messages: Sequence[Any], session: str = "s", **more: Any) -> Any:
        """Run one unary turn; return the assistant message, to be echoed in the next."""
        return (await self.chat(messages, session, **more))["choices"][0]["message"]

    async def export(self, session: str = "s", layout: str = "concat", **more: Any) -> list[Any]:
        return (await self.ok("/trajectories/export", {"session_id": session, "layout": layout, **more}))["samples"]

    async def tree(self, session: str = "s") -> list[Any]:
        response = await self.http.get(f"/rl/sessions/{session}")
        assert response.status_code == 200, response.text
        return response.json()["interactions"]

    def forget_sessions(self) -> None:
        """Drop all sessions from memory, as if they had been idle for long."""
        for session in self.app.state.registry.sessions():
            self.app.state.registry.forget(session)

    def prompts(self) -> list[list[int]]:
        """The prompts of the engine as token ids, in order of request."""
        return [list(request.input_ids) for request in self.engine.requests]


@cache
def migrated() -> bytes:
    """A migrated SQLite database to copy, because the migrations take half of an app's start-up time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "migrated.db"
        schema.upgrade(f"sqlite:///{path}")
        return path.read_bytes()


def default_url(folder: Path) -> str:
    """Return the database URL of a test that names none: its entry in `databases.urls`, or a migrated file."""
    if url := databases.urls.get(folder):
        return url
    path = folder / "test.db"
    if not path.exists():
        path.write_bytes(migrated())
    return f"sqlite:///{path}"


@contextlib.asynccontextmanager
async def serving(
    folder: Path,
    script: Script,
    renderer: Renderer | None = None,
    engine_type: type[ScriptedEngine] = ScriptedEngine,
    **settings: Any,
) -> AsyncIterator[Server]:
    """Run an app on the scripted engine with a database in `folder`, and an HTTP client for it.

    `renderer`: that of another model than the built-in one.
    """
    configured = Settings(**{"database_url": default_url(folder), "migrate": True, **settings})
    renderer = renderer or tiny_renderer(configured.thinking_retention)
    engine = engine_type(script, vocab_size=renderer.vocab_size)
    app = build_app(configured, engine=engine, renderer=renderer)
    app.wrong_keys = None  # tests of refusals send many
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON)
    async with app.router.lifespan_context(app), client as http:
        yield Server(app, http, engine)


@contextlib.contextmanager
def real_server(folder: Path, engine: str = "scripted", **settings: Any) -> Iterator[str]:
    """Run a server of the built-in model on a real socket, with the database `default_url(folder)`; yield its URL."""
    given = {"port": 0, "engine": engine, "database_url": default_url(folder), "log_level": "warning", **settings}
    configured = Settings(**given)
    with shared_renderer(configured), server.serving(configured) as url:
        yield url


def shared_renderer(settings: Settings) -> AbstractContextManager[object]:
    """Let servers of the built-in model that start in the block share one renderer.

    The self-check of its template takes longer than a test.
    """
    renderer = tiny_renderer(settings.thinking_retention)
    return mock.patch("proxy.app.load_renderer", lambda settings, folder: renderer)


class LoopPasses:
    """Counts the passes of asyncio's running event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        loop = asyncio.get_running_loop()
        run = loop._run_once  # type: ignore[attr-defined]

        def counted() -> None:
            self.count += 1
            run()

        monkeypatch.setattr(loop, "_run_once", counted)
