"""Results of episodes that did not end by themselves, and the end of their sessions."""

from __future__ import annotations

import asyncio

from tokengrove.client import AsyncClient
from tokengrove.client.exit_reason import storable
from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult, FailureKind, give_up

_ON_ITS_WAY_S = 0.5


def failed(plan: EpisodePlan, failure: FailureKind, message: str, seconds: float = 0.0) -> EpisodeResult:
    """The result of an attempt that failed outside its session."""
    return EpisodeResult(
        task_id=plan.task.task_id,
        sample=plan.sample,
        attempt=plan.attempt,
        session_id=plan.session_id,
        failure=failure,
        message=storable(message),
        seconds=seconds,
    )


async def end_lost_session(plan: EpisodePlan, failure: FailureKind, reason: str) -> None:
    """End the session of an attempt that nobody plays any more, or withdraw it if `failure` is in `plan.discard`.

    This is done twice: when the worker died, the start of the session may still have been on its way to the server.
    """
    async with AsyncClient(plan.server.url, plan.server.admin_key) as client:
        if await give_up(client, plan, failure, reason):
            await asyncio.sleep(_ON_ITS_WAY_S)
            await give_up(client, plan, failure, reason)
