"""The running episodes of an executor. Each is cancelled with its caller, and all when the executor is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult
from tokengrove.rollout.executors.results import failed


class Playing:
    """Runs at most `concurrency` episodes at once. For one event loop."""

    def __init__(self, concurrency: int) -> None:
        self._places = asyncio.Semaphore(concurrency)
        self._tasks: set[asyncio.Task[EpisodeResult]] = set()
        self._closed = False

    async def result(self, plan: EpisodePlan, step: Coroutine[Any, Any, EpisodeResult]) -> EpisodeResult:
        """Await `step`, which plays an episode. If `end` cancels it, the result has the failure `cancelled`."""
        try:
            async with self._places:
                if self._closed:
                    return failed(plan, "cancelled", "the executor is closed")
                return await self._in_a_task(plan, step)
        finally:
            step.close()  # has an effect only if it never began

    async def end(self) -> None:
        """Cancel all episodes, wait until they have ended, and play no more."""
        self._closed = True
        while tasks := list(self._tasks):
            for task in tasks:
                if not task.cancelling():  # its caller may have cancelled it
                    task.cancel()
            await to_the_end(_ended(tasks))

    async def _in_a_task(self, plan: EpisodePlan, step: Coroutine[Any, Any, EpisodeResult]) -> EpisodeResult:
        task = asyncio.ensure_future(step)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and caller is not None and not caller.cancelling():
                return failed(plan, "cancelled", "the executor was closed")
            if not task.cancelling():  # `end` may have cancelled it
                task.cancel()
            await to_the_end(_ended([task]))
            raise


async def _ended(tasks: list[asyncio.Task[EpisodeResult]]) -> None:
    await asyncio.wait(tasks)
