"""Calls whose request or answer was lost on the way, and that both clients sent again, were done once by the server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import Server, says, serving, user
from tokengrove.client import AsyncClient, Client
from tokengrove.client.http_clients import AsyncTransport, Transport

Kind = type[Client] | type[AsyncClient]
both = pytest.mark.parametrize("kind", [Client, AsyncClient])
lost = pytest.mark.parametrize("after", [False, True], ids=["request", "answer"])


class Lossy(httpx.BaseTransport, httpx.AsyncBaseTransport):
    """Loses the first two requests of a path, or the answers to them. `requests`: how many were sent there."""

    def __init__(self, client: Client | AsyncClient, after: bool) -> None:
        assert client.hold is not None
        self._blocking, self._asyncio = Transport(client.hold), AsyncTransport(client.hold)
        self._after, self.path, self.requests = after, "", 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self._meet(request, before=True)
        response = self._blocking.handle_request(request)
        response.read()
        self._meet(request, before=False)
        return response

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._meet(request, before=True)
        response = await self._asyncio.handle_async_request(request)
        await response.aread()
        self._meet(request, before=False)
        return response

    def _meet(self, request: httpx.Request, *, before: bool) -> None:
        if not self.path or not request.url.path.endswith(self.path):
            return
        self.requests += before
        if self.requests <= 2 and before != self._after:
            raise httpx.ReadError("lost", request=request)


class Peer:
    """A client whose calls are awaited, whichever it is."""

    def __init__(self, client: Any, transport: Lossy) -> None:
        self.client, self.transport = client, transport

    async def __call__(self, call: Callable[[], Any], losing: str = "") -> Any:
        """Make a call, of which the first two attempts at the path `losing` are lost."""
        self.transport.path, self.transport.requests = losing, 0
        result = call() if isinstance(self.client, AsyncClient) else await asyncio.to_thread(call)
        result = await result if inspect.isawaitable(result) else result
        assert self.transport.requests == (3 if losing else 0)
        self.transport.path = ""
        return result


@asynccontextmanager
async def peer(kind: Kind, folder: Path, after: bool, **settings: Any) -> AsyncIterator[tuple[Peer, Server]]:
    async with serving(folder, says(*["yes"] * 4), **settings) as server:
        client: Any = kind(app=server.app)
        transport = Lossy(client, after)
        client._http = httpx.Client(transport=transport) if kind is Client else httpx.AsyncClient(transport=transport)
        yield Peer(client, transport), server
        await (client.aclose() if kind is AsyncClient else asyncio.to_thread(client.close))


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokengrove.client.retries._FIRST_PAUSE_S", 0.0)


@both
@lost
@pytest.mark.parametrize("options", [{}, {"session_id": "mine", "api_key": "sk-of-a-slot"}])
async def test_a_start_is_one_session_whose_keys_work(
    kind: Kind, after: bool, options: dict[str, Any], tmp_path: Path
) -> None:
    async with peer(kind, tmp_path, after) as (ask, _):
        session = await ask(lambda: ask.client.start_session("t", **options), "start_session")
        [listed] = await ask(ask.client.sessions)
        assert listed["session_id"] == session.session_id == options.get("session_id", session.session_id)
        assert session.api_key == options.get("api_key", session.api_key)
        assert await ask(session.end, "end_session") == 0


@both
@lost
async def test_a_reward_is_set_once_and_never_comes_back(kind: Kind, after: bool, tmp_path: Path) -> None:
    async with peer(kind, tmp_path, after) as (ask, server):
        session = await ask(lambda: ask.client.start_session("t", session_id="s"))
        await server.chat([user("hi")], "s")
        await ask(lambda: session.set_reward(1.0), "set_reward")
        await ask(lambda: session.set_reward(0.5), "set_reward")
        assert [node["reward"] for node in await server.tree("s")] == [0.5]


@both
@lost
async def test_a_claim_leases_its_sessions_once(kind: Kind, after: bool, tmp_path: Path) -> None:
    async with peer(kind, tmp_path, after) as (ask, _):
        for name in ("a", "b", "c"):
            session = await ask(lambda name=name: ask.client.start_session("t", session_id=name))
            await ask(session.end)
        claims = [await ask(lambda: ask.client.claim(limit=1), "claim") for _ in range(3)]
        assert [list(claim.sessions) for claim in claims] == [["a"], ["b"], ["c"]]
        assert len({claim.claim_id for claim in claims}) == 3
        done = await ask(lambda: ask.client.acknowledge(claims[0]), "acknowledge")
        assert done.sessions == ("a",)


@both
@lost
async def test_capacity_is_granted_once(kind: Kind, after: bool, tmp_path: Path) -> None:
    async with peer(kind, tmp_path, after, capacity_control=True) as (ask, _):
        assert await ask(lambda: ask.client.grant_capacity(8), "grant_capacity") == 8
        assert await ask(lambda: ask.client.grant_capacity(1)) == 9


@both
@lost
async def test_the_keys_of_a_session_are_replaced_once_and_those_that_came_work(
    kind: Kind, after: bool, tmp_path: Path
) -> None:
    async with peer(kind, tmp_path, after, admin_key="admin-key-of-the-test") as (ask, _):
        ask.client.admin_key = "admin-key-of-the-test"
        session = await ask(lambda: ask.client.start_session("t"))
        await ask(session.rotate_keys, "rotate_keys")
        await ask(session.end)


@both
@lost
async def test_a_session_is_deleted_once(kind: Kind, after: bool, tmp_path: Path) -> None:
    async with peer(kind, tmp_path, after) as (ask, server):
        await server.chat([user("hi")], "s")
        assert await ask(lambda: ask.client.delete_session("s"), "/rl/sessions/s") == 1
        assert await ask(ask.client.sessions) == []
