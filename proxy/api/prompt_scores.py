"""Scores of the prompts of one request, within the limits of turns. They stop if the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from starlette.types import Receive

from proxy.api.connections import while_connected
from proxy.resources.senders import Sender
from proxy.turns.route import EngineRoute
from proxy.turns.scores import Scored, Scores, score
from proxy.turns.turns import Turns
from proxy.types import Api, TurnRequest
from tokengrove.errors import SHUTTING_DOWN, EngineUnavailable

_AT_ONCE = 2
"""The prompts of one request that are in the engine at once, so that scores leave room for turns."""


async def score_all(
    receive: Receive,
    turns: Turns,
    route: EngineRoute,
    adapter: int | None,
    wanted: Sequence[Scored],
    temperature: float,
    top: int,
    sender: Sender,
) -> list[Scores]:
    """Score all prompts, or raise the first error. They count as one request within the limits of turns.

    `top`, `adapter`: as in `turns.scores.score`. Raises its errors, TooManyRequests, and ClientDisconnect.
    """
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(prompt: Scored) -> Scores:
        async with free:
            return await score(route, prompt, temperature, top, adapter)

    async def all_of_them() -> list[Scores]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in wanted]
        return [task.result() for task in tasks]

    counted = TurnRequest(api=Api.GENERATE, model=route.model, messages=(), sender=sender)
    running = turns.running.run_unrecorded(counted, all_of_them())
    try:
        return await while_connected(receive, running)
    except asyncio.CancelledError:
        if not running.cancelled():
            raise
        raise EngineUnavailable(SHUTTING_DOWN) from None
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
