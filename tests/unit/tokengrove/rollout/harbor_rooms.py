"""Trials of Harbor tasks in rooms of this machine, with shell commands as agents."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from tokengrove.errors import ConfigurationError
from tokengrove.rollout.episodes import EpisodeEnded
from tokengrove.rollout.harbor import HarborOptions, Stage, TaskFolder
from tokengrove.rollout.harbor.harbor_sandbox import Blueprint, HarborSandbox
from tokengrove.rollout.harbor.room import Room
from tokengrove.rollout.harbor.sandboxes import Sandboxes
from tokengrove.rollout.harbor.task_config import Environment
from tokengrove.rollout.harbor.trial import Trial

Work = Callable[[Stage, HarborSandbox, float | None], Awaitable[EpisodeEnded | None]]


def shell(*scripts: str) -> Work:
    """Runs a script in each stage."""
    left = list(scripts)

    async def work(stage: Stage, sandbox: HarborSandbox, limit_s: float | None) -> None:
        told = await sandbox.run(left.pop(0))
        assert told.exit_code == 0, told.output

    return work


async def tried(folder: Path, work: Work, **options: Any) -> dict[str, float]:
    """The rewards of a task that `work` works on."""
    read = HarborOptions.read(options)
    sandboxes = Sandboxes(read)
    return await Trial(sandboxes.task(TaskFolder(folder).folder), "trial", work, read, sandboxes.make).play()


def room(tmp_path: Path, **fields: Any) -> Room:
    """A room without a Dockerfile."""
    return Room(Blueprint(Environment(), tmp_path / "build", {}, tmp_path / "task"), **fields)


@pytest.fixture(scope="session")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Skips tests where the machine allows no rooms."""

    async def one() -> None:
        place = room(tmp_path_factory.mktemp("room"))
        await place.start()
        await place.stop()

    try:
        asyncio.run(one())
    except ConfigurationError as error:
        pytest.skip(str(error))
