"""The run of an agent within its time: whatever it does, its caller gets a result or an exception, and goes on."""

from __future__ import annotations

import asyncio
from typing import Any

from tokengrove.rollout.episode import Overdue
from tokengrove.rollout.episodes.agent import Agent
from tokengrove.rollout.episodes.ended import EpisodeEnded
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.failures import AgentFailed


async def run_agent(agent: Agent, episode: Episode) -> Any:
    """Return what the agent returns. Raises what it raises, and EpisodeEnded (Timeout) after `plan.timeout_s`."""
    limit_s = episode.plan.timeout_s
    told = "" if limit_s is None else f"the agent has not ended within {limit_s:g} s (timeout_s)"
    try:
        return await episode.play(_contained(agent, episode), limit_s, told)
    except Overdue as late:
        raise EpisodeEnded("Timeout", str(late)) from None


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
