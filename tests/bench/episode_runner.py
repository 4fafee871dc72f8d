"""A runner of the bench of episodes, in a process of its own so that only its work is measured.

It reads a `Load` and the server's URL as a line of JSON from standard input and plays a few episodes first. At each
further line it plays the whole load and writes a line with the kinds of failures."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task
from tokengrove.rollout.executors import Executor, ExecutorKind, ExecutorOptions, executor_for

_PYTHON_AGENTS = {"httpx": "of_httpx", "openai": "of_openai", "blocking": "blocking"}


@dataclass(frozen=True, slots=True)
class Load:
    """`episodes` at once of `turns` turns, with `wait_s` seconds before each turn."""

    agent: str
    kind: ExecutorKind
    workers: int | None
    episodes: int
    turns: int
    wait_s: float

    @property
    def spec(self) -> AgentSpec:
        if self.agent == "command":
            words = (sys.executable, "-m", "tests.bench.episode_agents", str(self.turns), str(self.wait_s))
            return AgentSpec("command", words=words, arguments={"env": {"PYTHONPATH": str(Path.cwd())}})
        return AgentSpec("path", f"tests.bench.episode_agents:{_PYTHON_AGENTS[self.agent]}")

    def plan(self, number: int, url: str, name: str) -> EpisodePlan:
        task = Task(str(number), {"turns": self.turns, "wait_s": self.wait_s})
        return EpisodePlan(task, 0, 0, Server(url), self.spec, f"{name}-{number}", start_timeout_s=3600.0)


async def play(executor: Executor, load: Load, url: str, name: str, count: int) -> list[EpisodeResult]:
    return await asyncio.gather(*(executor.play(load.plan(number, url, name)) for number in range(count)))


async def run(load: Load, url: str, name: str) -> None:
    async with executor_for(ExecutorOptions(load.kind, load.episodes, load.workers)) as executor:
        await play(executor, load, url, f"{name}-first", min(load.episodes, 2 * (load.workers or 1)))
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        results = await play(executor, load, url, name, load.episodes)
        print(json.dumps(Counter(f"{result.failure}: {result.message}" for result in results if result.failure)))
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)


def main() -> None:
    given = json.loads(sys.stdin.readline())
    asyncio.run(run(Load(**given["load"]), given["url"], given["name"]))


if __name__ == "__main__":
    main()
