"""AReaL's workflow on a server in this process: agents of every kind reach it, and a group exports its tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, OpenAI

from proxy.api.turn_routes import App
from tests.support import says, serving, tiny_renderer, user
from tokengrove.areal import GroupedRolloutWorkflow, OpenAIProxyWorkflow
from tokengrove.client import AsyncClient, Client

HELLO: list[Any] = [user("hello")]


class OpenAIAgent:
    async def run(self, data: Any, *, base_url: str, api_key: str, http_client: Any) -> float:
        sdk = AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http_client)
        stream = await sdk.chat.completions.create(model="m", messages=HELLO, stream=True)
        return float("".join([part.choices[0].delta.content or "" async for part in stream]) == "an answer")


class AnthropicAgent:
    """Brings an HTTP client of httpx2, which its SDK takes."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def run(self, data: Any, *, base_url: str, api_key: str) -> float:
        async with AsyncClient(app=self._app) as client, client.http_client("httpx2") as http:
            sdk = AsyncAnthropic(base_url=base_url, api_key=api_key, http_client=http)
            reply = await sdk.messages.create(model="m", max_tokens=9, messages=HELLO)
        return float(reply.content[0].type == "text")


class BlockingAgent:
    """Runs in a thread, and brings an HTTP client that blocks."""

    def __init__(self, app: App) -> None:
        self._app = app

    def run(self, data: Any, *, base_url: str, api_key: str) -> float:
        with Client(app=self._app) as client, client.http_client() as http:
            sdk = OpenAI(base_url=base_url, api_key=api_key, http_client=http)
            return float(
                sdk.chat.completions.create(model="m", messages=HELLO).choices[0].message.content == "an answer"
            )


@pytest.mark.parametrize("kind", [OpenAIAgent, AnthropicAgent, BlockingAgent])
async def test_a_group_of_agents_runs_in_the_process_of_the_server(tmp_path: Path, kind: type) -> None:
    async with serving(tmp_path, says(*["an answer"] * 3), admin_key="k") as server:
        agent = kind() if kind is OpenAIAgent else kind(server.app)
        async with AsyncClient(app=server.app, admin_key="k") as client:
            workflow = GroupedRolloutWorkflow(OpenAIProxyWorkflow(agent=agent, client=client), group_size=3)
            found = await workflow.arun_episode(None, {"messages": HELLO})
            sessions = await client.sessions()
    assert found is not None
    assert [interaction.reward for interaction in found.values()] == [1.0] * 3
    for interaction in found.values():
        assert tiny_renderer().decode(interaction.model_response.output_tokens).startswith("an answer")
    assert len({session["group_id"] for session in sessions}) == 1
