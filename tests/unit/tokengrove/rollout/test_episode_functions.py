"""Plain functions as agents: what they get by name, and which of them are refused before any episode."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support import says, serving
from tokengrove.client import AsyncClient
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, Server, Task, play, resolve_agent

HERE = "tests.unit.tokengrove.rollout.episode_agents"
TASK = Task("trees", {"question": "Name a tree.", "answer": "oak"})


@pytest.fixture
async def client(tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with (
        serving(tmp_path, says("oak"), admin_key="the-key") as server,
        AsyncClient(app=server.app, admin_key="the-key") as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("name", "arguments", "reward"), [("plain", {}, 0.5), ("blocking", {}, 0.25), ("scaled", {"scale": 3.0}, 3.0)]
)
async def test_a_function_plays_and_its_reward_counts(
    client: AsyncClient, name: str, arguments: dict[str, float], reward: float
) -> None:
    spec = AgentSpec("path", f"{HERE}:{name}", arguments=arguments)
    agent = resolve_agent(spec)
    result = await play(EpisodePlan(TASK, 0, 0, Server(""), spec, "episode"), agent, client)
    assert (result.failure, result.message, result.reward, result.turns) == (None, None, reward, 1)


@pytest.mark.parametrize(
    ("target", "arguments", "told"),
    [
        (f"{HERE}:scaled", {"size": 1}, "takes no argument 'size'; it takes data, base_url, http_client, scale"),
        (f"{HERE}:by_messages", {}, "has the parameter 'interaction_ids', which nothing fills"),
        (f"{HERE}:absent", {}, "has no 'absent'"),
        ("no.such.module:agent", {}, "there is no module 'no'"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(target: str, arguments: dict[str, int], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        resolve_agent(AgentSpec("path", target, arguments=arguments))


def test_a_function_needs_nothing_of_other_systems() -> None:
    code = (
        "import sys; from tokengrove.rollout.episodes import *; resolve_agent(AgentSpec('path', 'json:loads'))\n"
        "print([name for name in sys.modules if name.startswith(('tokengrove.verl', 'tokengrove.roll.'))])"
    )
    run = [sys.executable, "-c", code]
    told = subprocess.run(run, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": "."})
    assert told.stdout.strip() == "[]"
