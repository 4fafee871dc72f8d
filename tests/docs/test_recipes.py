"""The recipe of train.md goes on where a rollout fails."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest

from proxy.serving.server import serving
from proxy.settings import Settings
from tests.docs.pages import ROOT, blocks_of
from tokengrove import AsyncClient


def recipe() -> dict[str, Any]:
    """What the block of train.md with the rollouts defines."""
    [block] = [block for block in blocks_of(ROOT / "docs" / "train.md") if "async def play(" in block.text]
    names: dict[str, Any] = {"__name__": "recipe"}
    exec(compile(block.text, block.place, "exec"), names)
    return names


class Agent:
    """Fails in the rollouts with these numbers, before a turn or after it."""

    def __init__(self, agent: Any, *fails: int, after: bool = False) -> None:
        self._agent, self._fails, self._after, self._number = agent, fails, after, -1

    async def __call__(self, base_url: str, api_key: str, prompt: str) -> str:
        self._number += 1
        if (fails := self._number in self._fails) and not self._after:
            raise ValueError(f"{prompt} has no tool")
        answer: str = await self._agent(base_url, api_key, prompt)
        if fails:
            raise ValueError(f"{prompt} has no tool")
        return answer


async def played(url: str, names: dict[str, Any]) -> tuple[float, list[dict[str, Any]], Any]:
    async with AsyncClient(url) as client:
        reward = await names["play"](client, "task")
        return reward, await client.sessions(), await client.claim(filter={"task_id": "task"}, limit=1000)


@pytest.mark.parametrize("after", [False, True])
def test_the_recipe_of_train_survives_a_rollout_that_fails_and_names_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, after: bool
) -> None:
    names = recipe()
    names["agent"] = Agent(names["agent"], 9, after=after)
    settings = Settings(port=0, engine="scripted", database_url=f"sqlite:///{tmp_path / 't.db'}", log_level="warning")
    with serving(settings) as url, caplog.at_level(logging.WARNING):
        reward, sessions, claim = asyncio.run(played(url, names))
    assert 0.0 <= reward <= 1.0
    outcomes = [each["outcome"] for each in sessions]
    assert (outcomes.count("Finished"), outcomes.count("Failed"), len(outcomes)) == (31, 1, 32)
    [failed] = [each for each in sessions if each["outcome"] == "Failed"]
    assert "has no tool" in failed["exit_reason"]
    [told] = [record.getMessage() for record in caplog.records if "has no tool" in record.getMessage()]
    assert told.startswith("task: rollout ") and "failed: ValueError(" in told
    assert len(claim.sessions) == 32  # the failed one ended, so that its group is whole


def test_the_recipe_of_train_ends_where_every_rollout_fails(tmp_path: Path) -> None:
    names = recipe()
    names["agent"] = Agent(names["agent"], *range(32))
    settings = Settings(port=0, engine="scripted", database_url=f"sqlite:///{tmp_path / 't.db'}", log_level="warning")
    with serving(settings) as url, pytest.raises(RuntimeError, match="all 32 rollouts of task failed") as caught:
        asyncio.run(played(url, names))
    assert isinstance(caught.value.__cause__, ValueError)
