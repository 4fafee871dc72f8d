"""Workers of one server on one event loop, each with an HTTP client of its own, so that a test chooses who answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx

from proxy.app import build_app
from proxy.engine.interface import Engine
from proxy.serving.server import new_server
from proxy.serving.worker import private_socket
from proxy.settings import Settings
from proxy.workers.attempt_table import AttemptTable
from proxy.workers.group import Place
from tests.mailboxes import MailServer
from tests.support import tiny_renderer

WORKERS = 2


class Workers:
    """The workers of a server; `workers[n]` is the n-th. They can be killed and started again."""

    def __init__(self, folder: Path, settings: Settings, engine: Callable[[], Engine] | None) -> None:
        self._folder, self._settings, self._engine = folder, settings, engine
        self._attempt_table = AttemptTable(settings.workers, 100)
        self._stacks: dict[int, contextlib.AsyncExitStack] = {}
        self._running: dict[int, MailServer] = {}

    def __getitem__(self, number: int) -> Any:
        return self._running[number]

    async def start(self, number: int) -> None:
        place = Place(number, self._attempt_table, self._folder)
        engine = None if self._engine is None else self._engine()
        app = build_app(self._settings, engine=engine, renderer=tiny_renderer(), place=place)
        stack = self._stacks[number] = contextlib.AsyncExitStack()
        await stack.enter_async_context(self._answering(app, place))
        await stack.enter_async_context(app.router.lifespan_context(app))
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://t", timeout=60))
        self._running[number] = MailServer(app, http, app.state.engine)

    async def stop(self, number: int) -> None:
        """End a worker; as the supervisor does, forget what it ran."""
        await self._stacks.pop(number).aclose()
        self._attempt_table.clear(number)

    @contextlib.asynccontextmanager
    async def _answering(self, app: Any, place: Place) -> AsyncIterator[None]:
        server = new_server(app.state.for_workers, self._settings)
        with private_socket(Path(place.peers.address())) as private:
            task = asyncio.create_task(server.serve(sockets=[private]))
            try:
                yield
            finally:
                server.should_exit = server.force_exit = True
                await task


@contextlib.asynccontextmanager
async def workers_of(
    folder: Path, url: str, make: Callable[[], Engine] | None = None, **settings: Any
) -> AsyncIterator[Workers]:
    """Run two workers on the database at `url`; `make` gives the engine of each, in place of that of the settings."""
    configured = Settings(**{"workers": WORKERS, "database_url": url, "engine": "scripted", **settings})
    workers = Workers(folder, configured, make)
    try:
        for number in range(WORKERS):
            await workers.start(number)
        yield workers
    finally:
        for number in sorted(workers._stacks, reverse=True):
            await workers.stop(number)
