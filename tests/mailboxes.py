"""A server on the mailbox engine, agents that wait for its replies, and a worker that delivers them."""

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
from proxy.rendering import Renderer
from proxy.settings import Settings
from tests.support import Server, default_url, tiny_renderer, user

PATIENCE_S = 60.0
"""Timeout of a poll whose request is certain to arrive."""


@dataclass
class MailServer(Server):
    """A running app on the mailbox engine."""

    @property
    def mailbox(self) -> Mailbox:
        mailbox: Mailbox = self.app.state.engine
        return mailbox

    async def poll(self, **body: Any) -> Any:
        return await self.ok("/mailbox/next", body)

    async def letter(self, **body: Any) -> Any:
        """Wait for the next request and return it."""
        letter = await self.poll(**{"wait_s": PATIENCE_S, **body})
        assert letter["status"] == "request", letter
        return letter

    async def deliver(self, letter: Any, **answer: Any) -> Any:
        return await self.ok("/mailbox/deliver", {"request_id": letter["request_id"], **answer})

    async def refused(self, letter: Any, status: int = 400, **answer: Any) -> str | None:
        """Send a delivery that is refused; return the field that the error names."""
        response = await self.post("/mailbox/deliver", {"request_id": letter["request_id"], **answer})
        assert response.status_code == status, response.text
        param: str | None = response.json()["error"]["param"]
        return param

    def ask(self, text: str = "hi", session: str = "s", **more: Any) -> asyncio.Task[Any]:
        """Send an agent's turn, wait for the delivered reply, and return its body."""
        return asyncio.create_task(self.chat([user(text)], session, **more))

    async def entry(self, session: str = "s") -> Any:
        """Return the only interaction of a session."""
        (node,) = await self.tree(session)
        return node


@contextlib.asynccontextmanager
async def posting(folder: Path, renderer: Renderer | None = None, **settings: Any) -> AsyncIterator[MailServer]:
    """Run an app on the mailbox engine with a database in `folder`; at its end, waiting agents get an error.

    `renderer`: that of another model than the built-in one.
    """
    given = {"database_url": default_url(folder), "migrate": True, "shutdown_timeout_s": 0.0, **settings}
    app = build_app(Settings(engine="mailbox", **given), renderer=renderer or tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://t") as http:
        http.timeout = httpx.Timeout(PATIENCE_S * 2)
        yield MailServer(app, http, app.state.engine)
