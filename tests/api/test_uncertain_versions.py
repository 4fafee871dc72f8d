"""An engine server that names weight versions that nobody published: no token is labelled newer than the fleet."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio

from proxy.app import build_app
from proxy.settings import Settings
from tests.engines.wire import LiveWire
from tests.support import JSON, Server, default_url, tiny_renderer, user


@pytest_asyncio.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Server, Any]]:
    live = LiveWire()
    await live.start()
    settings = Settings(engine=live.url, database_url=default_url(tmp_path), migrate=True, pause_timeout_s=5)
    app = build_app(settings, renderer=tiny_renderer())
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    client = httpx.AsyncClient(transport=transport, base_url="http://t", headers=JSON)
    try:
        async with app.router.lifespan_context(app), client as http:
            yield Server(app, http, app.state.engine), live.wire
    finally:
        await live.kill()


async def versions(server: Server, session: str, **filters: Any) -> list[int]:
    """The versions of the trained tokens of an export."""
    samples = await server.export(session, filter=filters) if filters else await server.export(session)
    return sorted({v for s in samples for v, mask in zip(s["versions"], s["loss_mask"], strict=True) if mask})


async def test_a_version_that_nobody_published_is_marked_and_never_fresh(served: tuple[Server, Any]) -> None:
    server, wire = served
    for stream in (False, True):
        session = f"lies-{stream}"
        wire.lie = "999"
        await server.post(
            f"/{session}/v1/chat/completions",
            {"model": "m", "messages": [user("hi")], "max_tokens": 9, "stream": stream},
        )
        [turn] = await server.tree(session)
        assert turn["notes"]["version"] == "uncertain" and {version for _, version in turn["versions"]} == {0}
        [sample] = await server.export(session)
        assert [entry.get("version") for entry in sample["turns"]] == ["uncertain"]
        assert await versions(server, session) == [0]
        assert await versions(server, session, min_version=0) == []
        [masked] = await server.export(session, filter={"min_version": 0}, stale="mask")
        assert sum(masked["loss_mask"]) == 0 < sum(sample["loss_mask"])
    assert (await server.http.get("/engine")).json()["version"] == 0


async def test_a_published_version_is_believed(served: tuple[Server, Any]) -> None:
    server, wire = served
    await server.ok("/engine/update_weights", {"path": "w", "version": 7})
    await server.chat([user("hi")], "true", max_tokens=9)
    [turn] = await server.tree("true")
    assert "version" not in turn["notes"] and await versions(server, "true", min_version=7) == [7]
    wire.lie = "8"
    await server.chat([user("hi")], "lie", max_tokens=9)
    assert await versions(server, "lie") == [7] and await versions(server, "lie", min_version=7) == []
    wire.lie = None
    await server.chat([user("hi")], "true-again", max_tokens=9)
    assert await versions(server, "true-again", min_version=7) == [7]
