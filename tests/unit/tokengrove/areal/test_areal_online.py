"""Mode online of AReaL's workflow: episodes are sessions that somebody else drives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from tests.support import real_server, user
from tokengrove.areal import OpenAIProxyWorkflow, resolve_workflow
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest

KEY = "a-key-of-the-administrator"


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    with real_server(tmp_path, engine_arg=("tokens=4",), admin_key=KEY, capacity_control=True) as url:
        async with AsyncClient(url, KEY) as client:
            yield client


async def use(client: AsyncClient, reward: float | None, outcome: str | None = None) -> str:
    """Drive a session as a user outside does; its start waits for a grant."""
    async with client.session("user") as session:
        async with AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as model:
            await model.chat.completions.create(model="default", messages=[user("Hello")])
        if reward is not None:
            await session.set_reward(reward)
        if outcome is not None:
            await session.end(outcome=outcome)
        return session.session_id


def online(client: AsyncClient, **options: Any) -> Any:
    return OpenAIProxyWorkflow("online", None, "", KEY, proxy_gateway_addr=client.url, **options).arun_episode(None, {})


async def granted(client: AsyncClient) -> None:
    """Wait for the grant of an episode that waits."""
    while True:
        if await client.grant_capacity(1) == 2:
            await client.grant_capacity(-1)
            return
        await client.grant_capacity(-1)


async def test_an_episode_is_the_next_session_that_ends(client: AsyncClient) -> None:
    waiting = asyncio.create_task(online(client, discount=0.5))
    await granted(client)
    session_id = await use(client, 0.75)
    interactions = await waiting
    assert [(turn.session_id, turn.reward) for turn in interactions.values()] == [(session_id, 0.75)]
    assert (await client.claim()).claim_id is None
    assert await client.grant_capacity(1) == 1


async def test_a_session_that_failed_has_no_result(client: AsyncClient) -> None:
    await client.grant_capacity()
    await use(client, 1.0, outcome="Failed")
    await client.grant_capacity(-1)
    assert await online(client, grant_capacity=False) is None
    assert await client.grant_capacity(1) == 1


@pytest.mark.parametrize("ending", ["timeout", "cancel"])
async def test_a_wait_that_ends_takes_its_grant_back(client: AsyncClient, ending: str) -> None:
    if ending == "timeout":
        with pytest.raises(TimeoutError, match=r"no session has ended within 0\.1 s"):
            await online(client, timeout_s=0.1)
    else:
        waiting = asyncio.create_task(online(client))
        await granted(client)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert await client.grant_capacity(1) == 1


async def test_a_session_that_cannot_be_exported_is_given_back(client: AsyncClient) -> None:
    await client.grant_capacity()
    session_id = await use(client, 1.0)
    workflow = OpenAIProxyWorkflow("online", client=client, grant_capacity=False)
    workflow.discount = 2.0  # refused by the export
    with pytest.raises(InvalidRequest, match="discount"):
        await workflow.arun_episode(None, {})
    assert list(await online(client, grant_capacity=False, filter={"task_id": "user"}))
    assert (await client.session_tree(session_id)).status == "ended"


def test_online_runs_no_agent() -> None:
    with pytest.raises(ValueError, match="runs no agent"):
        OpenAIProxyWorkflow("online", object(), "http://h")
    assert resolve_workflow(None, proxy_addr="http://h", mode="online").mode == "online"
    with pytest.raises(ValueError, match="mode='online'"):
        resolve_workflow(None, proxy_addr="http://h")
