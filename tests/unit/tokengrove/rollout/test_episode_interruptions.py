"""Episodes whose server goes away, or that are cancelled, at any request: nothing is lost and no session is left."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support import Server as Served
from tests.support import says, serving, user
from tests.wide import CROSSED
from tokengrove.client import AsyncClient, AsyncSession, ServerUnreachable, Session
from tokengrove.errors import EngineFailed, Forbidden, InvalidRequest, TooManyRequests, Unauthorized
from tokengrove.rollout.episodes import (
    Agent,
    AgentSpec,
    Episode,
    EpisodePlan,
    EpisodeResult,
    FailureKind,
    Server,
    Task,
    play,
)
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.failure import failure_of_agent
from tokengrove.rollout.episodes.function_agent import FunctionAgent

PLAN = EpisodePlan(
    task=Task("trees", {}),
    sample=0,
    attempt=0,
    server=Server("http://t"),
    agent=AgentSpec("path", "unused"),
    session_id="episode",
    reward="tests.unit.tokengrove.rollout.episode_agents:nothing",
    scorers=("tests.unit.tokengrove.rollout.scorers_of_tests:by_length",),
)
REQUESTS = 8
"""Start, tree, the turn's messages for the reward function, reward, messages for the scorer, its score, tree, end."""


class Counted(httpx.AsyncBaseTransport):
    """Calls `at` with the number of each request of the client, from 1, before it is sent; an exception loses it."""

    def __init__(self, server: Served, at: Callable[[int], None]) -> None:
        self._inner, self._at = httpx.ASGITransport(app=server.app), at
        self.count = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.count += 1
        self._at(self.count)
        return await self._inner.handle_async_request(request)


class Once:
    """An agent with one turn, over a connection of its own."""

    def __init__(self, server: Served) -> None:
        self._server = server

    async def play(self, episode: Episode) -> Reward:
        headers = {"authorization": f"Bearer {episode.session.api_key}"}
        body = {"messages": [user("Name a tree.")]}
        await self._server.ok(f"/{episode.session.session_id}/v1/chat/completions", body, headers=headers)
        return 1.0

    async def close(self) -> None: ...


@asynccontextmanager
async def counted(folder: Path, at: Callable[[int], None]) -> AsyncIterator[tuple[Served, AsyncClient, Counted]]:
    async with serving(folder, says(*["oak"] * 4)) as server:
        transport = Counted(server, at)
        client = AsyncClient("http://t")
        client._http = httpx.AsyncClient(transport=transport)
        async with client:
            yield server, client, transport


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokengrove.rollout.retries._FIRST_PAUSE_S", 0.0)
    monkeypatch.setattr("tokengrove.client.retries._FIRST_PAUSE_S", 0.0)


async def of_server(server: Served) -> list[Any]:
    """The server's own list of the sessions that count."""
    listed = (await server.http.get("/rl/sessions", params={"filter": '{"withdrawn": false}'})).json()["sessions"]
    return [(each["session_id"], each["status"], each["outcome"]) for each in listed]


async def test_each_request_of_an_episode_may_be_lost(tmp_path: Path) -> None:
    lost = set[int]()

    def lose_every_other(number: int) -> None:
        if number % 2:
            lost.add(number)
            raise httpx.ConnectError("the server restarts")

    async with counted(tmp_path, lose_every_other) as (server, client, transport):
        result = await play(PLAN, Once(server), client)
        assert (result.failure, result.reward, result.scores) == (None, 1.0, {"length": 3.0})
        assert (transport.count, len(lost)) == (2 * REQUESTS, REQUESTS)
        assert await of_server(server) == [("episode", "ended", "Finished")]


async def test_a_server_that_stays_away_is_the_failure(tmp_path: Path) -> None:
    def away(number: int) -> None:
        if number > 1:
            raise httpx.ConnectError("the server is gone")

    async with counted(tmp_path, away) as (server, client, _):
        client.retry_s = 0.0
        result = await play(PLAN, Once(server), client)
        assert result.failure == "server"
        assert "the server is gone" in str(result.message)


@CROSSED
@pytest.mark.parametrize("discard", [frozenset[FailureKind](), frozenset[FailureKind](("cancelled",))])
@pytest.mark.parametrize("cancelled_at", range(1, REQUESTS + 1))
async def test_an_episode_that_is_cancelled_at_any_request_leaves_no_live_session(
    tmp_path: Path, cancelled_at: int, discard: frozenset[FailureKind]
) -> None:
    playing: asyncio.Task[EpisodeResult] | None = None

    def cancel(number: int) -> None:
        if number == cancelled_at:
            assert playing is not None
            playing.cancel()

    async with counted(tmp_path, cancel) as (server, client, _):
        agent: Agent = Once(server)
        playing = asyncio.create_task(play(replace(PLAN, discard=discard), agent, client))
        with pytest.raises(asyncio.CancelledError):
            await playing
        listed = await of_server(server)
        every = (await server.http.get("/rl/sessions")).json()["sessions"]
    assert [each["status"] for each in every] == ["ended"]
    if cancelled_at == REQUESTS:
        assert listed == [("episode", "ended", "Finished")]
    else:  # with `discard` it never ends in its group, which a claim would take for whole
        assert listed == ([] if discard else [("episode", "ended", "Failed")])


REQUEST = httpx.Request("POST", "http://public/episode/v1/chat/completions")
OTHER = httpx.Request("POST", "http://t:81/search")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (openai.APIConnectionError(request=REQUEST), "server"),
        (openai.APIConnectionError(request=OTHER), "agent"),
        (openai.InternalServerError("down", response=httpx.Response(503, request=REQUEST), body=None), "server"),
        (openai.BadRequestError("bad", response=httpx.Response(400, request=REQUEST), body=None), "agent"),
        (httpx.ReadError("broken", request=REQUEST), "server"),
        (httpx.ReadError("broken"), "agent"),
        (ServerUnreachable("away"), "server"),
        (EngineFailed("no weights"), "server"),
        (TooManyRequests("full"), "server"),
        (openai.RateLimitError("full", response=httpx.Response(429, request=REQUEST), body=None), "server"),
        (InvalidRequest("no such field"), "agent"),
        (ConnectionError("a tool"), "agent"),
    ],
)
def test_the_server_is_blamed_for_its_own_failures_only(error: Exception, kind: str) -> None:
    wrapped = RuntimeError("the agent gave up")
    wrapped.__cause__ = error
    handled = RuntimeError("and gave up")
    handled.__context__ = ExceptionGroup("both tools failed", [ValueError("another"), error])
    addresses = ("http://t", "http://public/episode")
    assert {failure_of_agent(each, addresses).kind for each in (error, wrapped, handled)} == {kind}


async def test_an_agent_has_no_key_that_rewards(tmp_path: Path) -> None:
    async def greedy(task: Any, session: AsyncSession) -> None:
        await session.generate([1, 2, 3], sampling_params={"max_tokens": 2})
        with pytest.raises(Forbidden):
            await session.set_reward(100.0)
        with pytest.raises(Forbidden):
            await session.end()

    async with (
        serving(tmp_path, says("oak"), admin_key="the-key") as server,
        AsyncClient(app=server.app, admin_key="the-key") as client,
    ):
        result = await play(PLAN, FunctionAgent(greedy, {}, "greedy"), client)
    assert (result.failure, result.message, result.reward) == (None, None, None)


async def test_an_agent_has_no_client_with_the_admin_key(tmp_path: Path) -> None:
    """Through what it is given it reaches its own session only, in a coroutine and in a thread."""

    async def greedy(task: Any, session: AsyncSession) -> None:
        await session.generate([1, 2, 3], sampling_params={"max_tokens": 2})
        with pytest.raises(Unauthorized):
            await session._client.sessions()

    def blocking(task: Any, session: Session) -> None:
        session.generate([1, 2, 3], sampling_params={"max_tokens": 2})
        with pytest.raises(Unauthorized):
            session._client.sessions()

    async with (
        serving(tmp_path, says("oak", "elm"), admin_key="the-key") as server,
        AsyncClient(app=server.app, admin_key="the-key") as client,
    ):
        for name, function in {"greedy": greedy, "blocking": blocking}.items():
            own = replace(PLAN, session_id=f"episode-{name}")
            result = await play(own, FunctionAgent(function, {}, name), client)
            assert (result.failure, result.message, result.turns) == (None, None, 1)
