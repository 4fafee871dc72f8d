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
    """Plays all episodes with one object, as AReaL does. A synchronous `run` is called in a thread.

    As in AReaL, `base_url` has no /v1, and works with the SDKs of OpenAI and Anthropic.
    """

    def __init__(self, agent: Any, arguments: Mapping[str, Any], name: str) -> None:
        self._agent, self.name = agent, name

    async def play(self, episode: Episode) -> Reward:
        """Call `run` with the arguments that it accepts: `base_url`, `api_key`, `http_client`. Raises its errors."""
        session = episode.session
        extra: dict[str, Any] = {"base_url": session.root_url, "api_key": session.api_key}
        with placeholder_key():
            async with AsyncExitStack() as stack:
                extra |= agent_access(["http_client"], episode, stack)
                result: Reward = await call_agent(self._agent.run, dict(episode.task.data), extra)
        return result

    async def close(self) -> None:
        """Do nothing: an AReaL agent has no resources."""
