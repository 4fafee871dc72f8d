"""AReaL's agents: any object with `run(data, **extra)`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from typing import Any

from tokengrove.rollout.agent_call import call_agent
from tokengrove.rollout.environment import placeholder_key
from tokengrove.rollout.episodes import Episode
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.agent_access import agent_access


class ArealAgent:
    """Plays with one object for all episodes, as AReaL does. A plain `run` is called in a thread.

    As in AReaL, `base_url` has no /v1, and is for OpenAI's and Anthropic's SDKs alike.
    """

    def __init__(self, agent: Any, arguments: Mapping[str, Any], name: str) -> None:
        self._agent, self.name = agent, name

    async def play(self, episode: Episode) -> Reward:
        """Call `run` with what it takes of `base_url`, `api_key` and `http_client`. What it raises is raised."""
        session = episode.session
        extra: dict[str, Any] = {"base_url": session.root_url, "api_key": session.api_key}
        with placeholder_key():
            async with AsyncExitStack() as stack:
                extra |= agent_access(["http_client"], episode, stack)
                result: Reward = await call_agent(self._agent.run, dict(episode.task.data), extra)
        return result

    async def close(self) -> None:
        """An agent of AReaL's has nothing to release."""
