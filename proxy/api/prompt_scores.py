"""Scores of the prompts of one request, within the limits of turns. They stop if the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from starlette.types import Receive

from proxy.api.connections import while_connected
from proxy.images.image_pool import ImagePool
from proxy.images.prompt_images import PromptImages
from proxy.resources.senders import Sender
from proxy.trajectory.tree import Branch, images_of, token_ids
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
    """Score all prompts. If the client leaves, the engine stops, and ClientDisconnect is raised.

    `top`, `adapter`: as in `turns.scores.score`. Raises its errors, and TooManyRequests.
    """
    task = begin_scores(turns, route, adapter, wanted, temperature, top, sender)
    return await scores_of(task, while_connected(receive, task))


def begin_scores(
    turns: Turns,
    route: EngineRoute,
    adapter: int | None,
    wanted: Sequence[Scored],
    temperature: float,
    top: int,
    sender: Sender,
) -> asyncio.Task[list[Scores]]:
    """Begin to score all prompts, which count as one request; `scores_of` returns them. Raises TooManyRequests."""
    free = asyncio.Semaphore(_AT_ONCE)

    async def one(prompt: Scored) -> Scores:
        async with free:
            return await score(route, prompt, temperature, top, adapter)

    async def all_of_them() -> list[Scores]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(prompt)) for prompt in wanted]
        return [task.result() for task in tasks]

    counted = TurnRequest(api=Api.GENERATE, model=route.model, messages=(), sender=sender)
    return turns.running.run_unrecorded(counted, all_of_them())


async def scores_of(task: asyncio.Task[list[Scores]], end: Awaitable[list[Scores]]) -> list[Scores]:
    """Return the result of `end`, which waits for `task`, or raise the first error of a prompt."""
    try:
        return await end
    except asyncio.CancelledError:
        if not task.cancelled() or (current := asyncio.current_task()) is None or current.cancelling():
            raise
        raise EngineUnavailable(SHUTTING_DOWN) from None
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def scored_output(node: Branch, images: ImagePool) -> Scored:
    """The output of a recorded turn, to be scored after its prompt."""
    placed, turn = images_of(node), node.interaction
    seen = PromptImages(placed, images, {}) if placed else None
    return Scored(token_ids(node), turn.prompt_tokens, seen, turn.session_id)
