"""`tokengrove harbor`: tries Harbor tasks without a model, to find those that can be played here."""

from __future__ import annotations

import asyncio
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from tokengrove import initial_block
from tokengrove.commands.failure import fail

Player = Literal["oracle", "nop"]
if TYPE_CHECKING:
    from tokengrove.rollout.harbor import HarborOptions, Tried

Data = Annotated[Path, typer.Argument(help="Folder of Harbor tasks, one task, or a registry file.")]
Agent = Annotated[Player, typer.Option(help="oracle: run the tasks' solutions; nop: nothing.")]
Option = Annotated[
    list[str] | None,
    typer.Option("--option", metavar="NAME=VALUE", help="As --agent-arg of rollout, such as sandbox=docker."),
]
Concurrency = Annotated[int, typer.Option(min=1, help="Tasks at once.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Only the first tasks, this many.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a line of JSON for each task.")]


def harbor(
    data: Data,
    agent: Agent = "oracle",
    option: Option = None,
    concurrency: Concurrency = 4,
    limit: Limit = None,
    as_json: AsJson = False,
) -> None:
    """Try Harbor tasks: run the solution of each task, and its tests. No server or model is needed.

    The exit code is 1 unless every task gives the expected reward: 1 for its solution, 0 with nop.
    """
    initial_block.hold()
    from tokengrove.rollout.harbor import HarborOptions, tasks, try_tasks

    options = HarborOptions.read(dict(_pair(each) for each in option or []))
    chosen = tasks(data)[:limit]
    wanted = 1.0 if agent == "oracle" else 0.0

    async def run() -> int:
        as_wanted = 0
        async for tried in try_tasks(chosen, agent, options, concurrency):
            good = _reward(tried, options) == wanted
            as_wanted += good
            print(_json(tried) if as_json else _line(tried, good), flush=True)
        return as_wanted

    good = asyncio.run(run())
    if not as_json:
        print(f"{good} of {len(chosen)} tasks with a reward of {wanted:g}")
    if good < len(chosen):
        sys.exit(1)


def _pair(text: str) -> tuple[str, Any]:
    name, given, value = text.partition("=")
    if not given:
        fail(f"--option {text!r} is not NAME=VALUE")
    try:
        return name.replace("-", "_"), json.loads(value)
    except ValueError:
        return name.replace("-", "_"), value


def _reward(tried: Tried, options: HarborOptions) -> float:
    """The main reward, or NaN."""
    return tried.rewards.get(options.reward_key, next(iter(tried.rewards.values()), math.nan))


def _json(tried: Tried) -> str:
    told = {"task_id": tried.task_id, "rewards": tried.rewards, "problem": tried.problem}
    return json.dumps({**told, "seconds": round(tried.seconds, 3)})


def _line(tried: Tried, good: bool) -> str:
    told = [f"{name} {value:g}" for name, value in tried.rewards.items()]
    told += [] if tried.problem is None or good else [" ".join(tried.problem.split())]
    return f"{'ok    ' if good else 'failed'} {tried.task_id} ({tried.seconds:.1f} s): {', '.join(told)}"
