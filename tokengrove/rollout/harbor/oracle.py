"""Tries tasks without a model: their own solution, which the tests should reward, or nothing, which they should not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tokengrove.rollout.command.failures import failure_of
from tokengrove.rollout.episodes import EpisodeEnded, Task
from tokengrove.rollout.harbor.data import FOLDER
from tokengrove.rollout.harbor.harbor_sandbox import AGENT_LOGS, SOLUTION, HarborSandbox
from tokengrove.rollout.harbor.options import HarborOptions
from tokengrove.rollout.harbor.sandboxes import Sandboxes
from tokengrove.rollout.harbor.task_folder import BadTask, Stage, TaskFolder
from tokengrove.rollout.harbor.trial import Trial
from tokengrove.rollout.harbor.variables import resolved

Player = Literal["oracle", "nop"]
"""The task's own solution, or nothing at all."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What became of a task. `rewards` is empty if it has none; `problem` says why, or how its solution failed.

    `seconds`: how long it took.
    """

    task_id: str
    rewards: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    seconds: float = 0.0


async def try_tasks(
    tasks: Iterable[Task], player: Player, options: HarborOptions, concurrency: int
) -> AsyncIterator[Tried]:
    """Try each task, so many at once, in the order in which they end. What one raises is its problem."""
    sandboxes = Sandboxes(options)
    places = asyncio.Semaphore(concurrency)

    async def one(task: Task) -> Tried:
        async with places:
            return await _tried(task, player, options, sandboxes)

    running = [asyncio.create_task(one(task)) for task in tasks]
    try:
        for ended in asyncio.as_completed(running):
            yield await ended
    finally:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await sandboxes.close()


async def solve(task: TaskFolder, stage: Stage, sandbox: HarborSandbox, limit_s: float | None) -> EpisodeEnded | None:
    """Run the solution, as Harbor's oracle does. Raises BadTask if there is none."""
    if stage.solution is None:
        raise BadTask(f"{task.folder / 'solution' / 'solve.sh'} is missing: it is what the oracle runs")
    await sandbox.empty(SOLUTION)
    await sandbox.put([(stage.solution, SOLUTION)])
    script, log = f"{SOLUTION}/solve.sh", f"{AGENT_LOGS}/oracle.txt"
    env = {**resolved(task.config.solution.env, "solution"), "DEBIAN_FRONTEND": "noninteractive"}
    command = f"chmod +x {script}; ({script}) > {log} 2>&1; code=$?; tail -c 500 {log}; exit $code"
    return failure_of(await sandbox.run(command, env, limit_s), "the solution", limit_s)


async def _tried(task: Task, player: Player, options: HarborOptions, sandboxes: Sandboxes) -> Tried:
    begun, problems = time.monotonic(), list[str]()
    rewards: dict[str, float] = {}

    async def work(stage: Stage, sandbox: HarborSandbox, limit_s: float | None) -> EpisodeEnded | None:
        ended = None if player == "nop" else await solve(folder, stage, sandbox, limit_s)
        problems.extend([] if ended is None else [str(ended)])
        return ended

    try:
        folder = sandboxes.task(Path(task.data[FOLDER]))
        name = f"{player}-{task.task_id.replace('/', '-')}"
        rewards = await Trial(folder, name, work, options, sandboxes.make).play()
    except Exception as error:
        problems = [str(error) or repr(error)]
    return Tried(task.task_id, rewards, "; ".join(problems) or None, time.monotonic() - begun)
