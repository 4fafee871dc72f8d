"""Episodes on the event loop of this process. Agents that block have a thread each.

An agent that crashes the process, or blocks the event loop, stops all episodes; the other executors isolate agents.
"""

from __future__ import annotations

from typing import Self

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.rollout.executors.agents import Agents
from tokengrove.rollout.executors.playing import Playing
from tokengrove.rollout.script import stop_import


class LocalExecutor:
    """Plays at most `concurrency` episodes at once, in this process."""

    def __init__(self, concurrency: int) -> None:
        self._playing = Playing(concurrency)
        self._agents = Agents()

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        stop_import()
        return await self._playing.result(plan, self._agents.play(plan))

    async def close(self) -> None:
        await self._playing.end()
        await self._agents.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
