"""Runs an agent with its time limit. Every failure of the agent becomes an exception that ends only its episode."""

from __future__ import annotations

import asyncio
from typing import Any

from tokengrove.rollout.episode import Overdue
from tokengrove.rollout.episodes.agent import Agent
from tokengrove.rollout.episodes.ended import EpisodeEnded
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.failures import AgentFailed


async def run_agent(agent: Agent, episode: Episode) -> Any:
    """Return the agent's result. Raises its exception, and EpisodeEnded (Timeout) after `plan.timeout_s` seconds."""
    limit_s = episode.plan.timeout_s
    told = "" if limit_s is None else f"the agent has not ended within {limit_s:g} s (timeout_s)"
    try:
        return await episode.play(_contained(agent, episode), limit_s, told)
    except Overdue as late:
        raise EpisodeEnded("Timeout", str(late)) from None


async def _contained(agent: Agent, episode: Episode) -> Any:
    """Convert exceptions that would end the event loop, or look like a cancellation of the episode, to AgentFailed."""
    try:
        return await agent.play(episode)
    except Exception:
        raise
    except asyncio.CancelledError as error:
        raise AgentFailed("CancelledError", "the agent was cancelled from inside") from error
    except BaseException as error:
        raise AgentFailed(type(error).__name__, str(error)) from error
