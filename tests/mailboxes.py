"""A server without an engine, agents that wait at it, and whoever answers them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from proxy.app import build_app
from proxy.engine.mailbox import Mailbox
from proxy.settings import Settings
from tests.support import Server, default_url, tiny_renderer, user

PATIENCE_S = 60.0
"""Longest wait of a poll whose request is sure to come."""


@dataclass
class MailServer(Server):
    """A running app on `--engine mailbox`."""

    @property
    def mailbox(self) -> Mailbox:
        mailbox: Mailbox = self.app.state.engine
        return mailbox

    async def poll(self, **body: Any) -> Any:
        return await self.ok("/mailbox/next", body)

    async def letter(self, **body: Any) -> Any:
        """The next request, waited for."""
        letter = await self.poll(**{"wait_s": PATIENCE_S, **body})
        assert letter["status"] == "request", letter
        return letter

    async def deliver(self, letter: Any, **answer: Any) -> Any:
        return await self.ok("/mailbox/deliver", {"request_id": letter["request_id"], **answer})

    async def refused(self, letter: Any, status: int = 400, **answer: Any) -> str | None:
        """The parameter that a refused delivery names."""
        response = await self.post("/mailbox/deliver", {"request_id": letter["request_id"], **answer})
        assert response.status_code == status, response.text
        param: str | None = response.json()["error"]["param"]
        return param

    def ask(self, text: str = "hi", session: str = "s", **more: Any) -> asyncio.Task[Any]:
        """An agent that waits for its turn; the reply's body."""
        return asyncio.create_task(self.chat([user(text)], session, **more))

    async def entry(self, session: str = "s") -> Any:
        """The only interaction of a session."""
        (node,) = await self.tree(session)
        return node


@contextlib.asynccontextmanager
async def posting(folder: Path, **settings: Any) -> AsyncIterator[MailServer]:
    """An app on `--engine mailbox` and a database in `folder`. Agents that still wait at its end are turned away."""
    given = {"database_url": default_url(folder), "migrate": True, "shutdown_timeout_s": 0.0, **settings}
    app = build_app(Settings(engine="mailbox", **given), renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        http.timeout = httpx.Timeout(PATIENCE_S * 2)
        yield MailServer(app, http, app.state.engine)
