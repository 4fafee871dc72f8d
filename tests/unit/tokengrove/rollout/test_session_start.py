"""The start of a session that is waited for, and what it leaves when an answer is lost or its task is cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from proxy.app import build_app
from proxy.settings import Settings
from tests.support import Server, default_url, says, serving, shared_renderer, user
from tokengrove.client import AsyncClient, Client, ServerUnreachable
from tokengrove.errors import InvalidRequest, KeyInUse, TooManyRequests
from tokengrove.rollout.session_start import start_session, start_session_here


class Lossy(httpx.AsyncBaseTransport):
    """Loses the answers of the first `lost` starts; `arrived` is set when the first start has reached the server.

    The next `refusals` starts are answered as a server does whose database is away.
    """

    def __init__(self, server: Server, lost: int) -> None:
        self._inner, self._lost = httpx.ASGITransport(app=server.app), lost
        self.arrived, self.answer = asyncio.Event(), asyncio.Event()
        self.answer.set()
        self.refusals = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self.refusals and request.url.path == "/rl/start_session":
            self.refusals -= 1
            return httpx.Response(503, json={"error": {"message": "away", "code": "store_unavailable"}})
        response = await self._inner.handle_async_request(request)
        if request.url.path == "/rl/start_session":
            self.arrived.set()
            await self.answer.wait()
            self._lost -= 1
            if self._lost >= 0:
                raise httpx.ReadTimeout("no answer", request=request)
        return response


@asynccontextmanager
async def lossy(folder: Path, lost: int = 0, **settings: Any) -> AsyncIterator[tuple[AsyncClient, Lossy, Server]]:
    async with serving(folder, says("yes"), **settings) as server:
        transport = Lossy(server, lost)
        client = AsyncClient("http://t")
        client._http = httpx.AsyncClient(transport=transport)
        async with client:
            yield client, transport, server


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokengrove.rollout.retries._FIRST_PAUSE_S", 0.0)


async def test_a_start_whose_answer_was_lost_leaves_one_session(tmp_path: Path) -> None:
    async with lossy(tmp_path, lost=2) as (client, _, _):
        session = await start_session(client, "t", 60.0, {"session_id": "mine", "metadata": {"step": 3}})
        (listed,) = await client.sessions()
        assert (listed["session_id"], listed["metadata"]) == ("mine", {"step": 3})
        await session.end()  # its keys are those of the session that is left


async def test_a_start_without_an_id_whose_answer_was_lost_leaves_one_session(tmp_path: Path) -> None:
    async with lossy(tmp_path, lost=2) as (client, _, _):
        session = await start_session(client, "t", 60.0, {})
        assert [listed["session_id"] for listed in await client.sessions()] == [session.session_id]
        await session.end()


async def test_a_session_with_turns_is_nobody_elses_to_delete(tmp_path: Path) -> None:
    async with lossy(tmp_path, lost=1) as (client, _, server):
        await server.chat([user("Hello")], "taken")
        with pytest.raises(InvalidRequest, match="exists already"):
            await start_session(client, "t", 60.0, {"session_id": "taken"})
        assert len(await server.tree("taken")) == 1


async def test_a_start_waits_for_a_place_as_long_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokengrove.client.transport._seconds", lambda header: 0.0)
    async with lossy(tmp_path, capacity_control=True) as (client, transport, _):
        with pytest.raises(TooManyRequests, match="grant_capacity"):
            await start_session(client, "t", 0.0, {})
        transport.arrived.clear()
        starting = asyncio.create_task(start_session(client, "t", 60.0, {}))
        await transport.arrived.wait()
        await client.grant_capacity()
        assert (await starting).session_id.startswith("t-")


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_start_that_is_cancelled_leaves_no_live_session(tmp_path: Path, times: int) -> None:
    async with lossy(tmp_path) as (client, transport, _):
        transport.answer.clear()
        starting = asyncio.create_task(start_session(client, "t", 60.0, {}))
        await transport.arrived.wait()
        for _ in range(times):
            starting.cancel()
            await asyncio.sleep(0)
        transport.answer.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        (listed,) = await client.sessions()
        assert (listed["status"], listed["outcome"]) == ("ended", "Failed")


async def test_a_start_that_is_cancelled_while_its_answer_is_lost_leaves_no_session(tmp_path: Path) -> None:
    async with lossy(tmp_path, lost=1) as (client, transport, _):
        transport.answer.clear()
        starting = asyncio.create_task(start_session(client, "t", 60.0, {"session_id": "mine"}))
        await transport.arrived.wait()
        starting.cancel()
        transport.answer.set()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await client.sessions() == []


async def test_a_start_that_is_cancelled_between_two_attempts_leaves_no_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has the keys of what the server started, as the answer was lost."""
    pausing = asyncio.Event()
    monkeypatch.setattr("tokengrove.rollout.retries._FIRST_PAUSE_S", 30.0)
    monkeypatch.setattr("tokengrove.rollout.retries.logger.warning", lambda *_: pausing.set())
    async with lossy(tmp_path, lost=1) as (client, _, _):
        starting = asyncio.create_task(start_session(client, "t", 60.0, {"session_id": "mine"}))
        await pausing.wait()
        assert len(await client.sessions()) == 1
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        assert await client.sessions() == []


async def test_a_server_whose_database_is_away_is_asked_again(tmp_path: Path) -> None:
    async with lossy(tmp_path) as (client, transport, _):
        transport.refusals = 2
        session = await start_session(client, "t", 60.0, {})
        assert [listed["session_id"] for listed in await client.sessions()] == [session.session_id]
        assert transport.refusals == 0


class LossyClient(Client):
    """Loses the answers of the next `lost` starts; `starts` counts them all."""

    lost = starts = 0

    def _send(self, call: Any) -> Any:
        answer = super()._send(call)
        if call.path == "/rl/start_session":
            self.starts, self.lost = self.starts + 1, self.lost - 1
            if self.lost >= 0:
                raise ServerUnreachable("no answer")
        return answer


@pytest.fixture(scope="module")
def blocking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LossyClient]:
    settings = Settings(engine="scripted", database_url=default_url(tmp_path_factory.mktemp("blocking")))
    with shared_renderer(settings), LossyClient(app=build_app(settings)) as client:
        yield client


@pytest.mark.parametrize("more", [{}, {"session_id": "mine"}, {"session_id": "slot", "api_key": "sk-of-a-slot"}])
def test_a_blocking_start_whose_answer_was_lost_leaves_one_session(blocking: LossyClient, more: dict[str, Any]) -> None:
    before = {listed["session_id"] for listed in blocking.sessions()}
    blocking.lost = 2
    session = start_session_here(blocking, "t", 60.0, more)  # type: ignore[arg-type]
    assert {listed["session_id"] for listed in blocking.sessions()} - before == {session.session_id}
    assert session.session_id == more.get("session_id", session.session_id)
    assert session.api_key == more.get("api_key", session.api_key)
    session.end()  # its keys are those of the session that is left


def test_a_blocking_start_is_not_repeated_where_nobody_waits(blocking: LossyClient) -> None:
    before = blocking.starts
    blocking.lost = 1
    with pytest.raises(ServerUnreachable):
        start_session_here(blocking, "t", 60.0, {"session_id": "stopped"}, may_wait=lambda: False)
    assert blocking.starts == before + 1


def test_a_key_of_another_live_session_is_refused_by_a_blocking_start(blocking: LossyClient) -> None:
    with blocking.session("t", api_key="sk-taken"), pytest.raises(KeyInUse):
        blocking.lost = 1
        start_session_here(blocking, "t", 60.0, {"session_id": "other", "api_key": "sk-taken"})
