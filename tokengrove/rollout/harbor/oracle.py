"""Tries tasks without a model: with their own solution, which tests should reward, or without any action."""

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
"""`oracle`: the task's own solution; `nop`: no action."""


@dataclass(frozen=True, slots=True)
class Tried:
    """The result of a task. `rewards`: empty after a failure. `problem`: the reason, or how the solution failed.

    `seconds`: the duration.
    """

    task_id: str
    rewards: dict[str, float] = field(default_factory=dict)
    problem: str | None = None
    seconds: float = 0.0


async def try_tasks(
    tasks: Iterable[Task], player: Player, options: HarborOptions, concurrency: int
) -> AsyncIterator[Tried]:
    """Try each task, `concurrency` at once; yield results as they complete. An exception is its task's `problem`."""
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
    """Run the solution, as Harbor's oracle does; return its failure, or None. Raises BadTask without a solution."""
    if stage.solution is None:
        raise BadTask(f"{task.folder / 'solution' / 'solve.sh'} is missing: the oracle runs it")
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
