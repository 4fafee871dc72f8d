"""The run of an agent within its time: whatever it does, its caller gets a result or an exception, and goes on."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes.agent import Agent
from tokengrove.rollout.episodes.ended import EpisodeEnded
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.failures import AgentFailed

_logger = logging.getLogger(__name__)
_GRACE_S = 10.0
"""How long an agent that is cancelled may take to clean up."""
_WAKE_S = 1.0


async def run_agent(agent: Agent, episode: Episode) -> Any:
    """Return what the agent returns. Raises what it raises, and EpisodeEnded (Timeout) after `plan.timeout_s`."""
    limit_s = episode.plan.timeout_s
    steps = _contained(agent, episode)
    playing = asyncio.ensure_future(steps)
    try:
        await asyncio.wait([playing], timeout=limit_s)
    except asyncio.CancelledError:
        await to_the_end(_stop(playing, steps, episode))
        raise
    if playing.done():
        return playing.result()
    await to_the_end(_stop(playing, steps, episode))
    raise EpisodeEnded("Timeout", f"the agent has not ended within {limit_s:g} s (timeout_s)")


async def _contained(agent: Agent, episode: Episode) -> Any:
    """Let no exception out that would end the event loop, or be taken for a cancellation of the episode."""
    try:
        return await agent.play(episode)
    except Exception:
        raise
    except asyncio.CancelledError as error:
        raise AgentFailed("CancelledError", "the agent was cancelled from inside") from error
    except BaseException as error:
        raise AgentFailed(type(error).__name__, str(error)) from error


async def _stop(playing: asyncio.Future[Any], steps: Coroutine[Any, Any, Any], episode: Episode) -> None:
    """Cancel it and wait until it has cleaned up. One that goes on in spite of it is closed where it waits: on the
    event loop it would keep the program from ending.
    """
    playing.add_done_callback(_retrieve)
    playing.cancel()
    await asyncio.wait([playing], timeout=_GRACE_S)
    if playing.done():
        return
    with suppress(BaseException):  # what it does instead of ending
        steps.close()
    playing.cancel()  # wakes it up
    await asyncio.wait([playing], timeout=_WAKE_S)
    told = "was closed" if playing.done() else "does not end; it is left"
    _logger.warning("the agent of session %s goes on though it was cancelled, and %s", episode.session.session_id, told)


def _retrieve(playing: asyncio.Future[Any]) -> None:
    """Keep asyncio from reporting what nobody asks for: the episode is over for another reason."""
    if not playing.cancelled():
        playing.exception()
