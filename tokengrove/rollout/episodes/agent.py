"""The interface that all kinds of agents are adapted to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tokengrove.rollout.episodes.episode import Episode

Reward = float | Mapping[str, float] | None
"""The reward of the session, rewards by interaction id, or None: the agent sets its rewards itself, or has none."""


class Agent(Protocol):
    """Plays episodes, several concurrently."""

    async def play(self, episode: Episode) -> Reward:
        """Play one episode to its end and return its reward.

        An exception makes the episode fail. At the episode's time limit this is cancelled, and must then leave no
        process or thread behind.
        """
        ...

    async def close(self) -> None:
        """Release resources that the episodes shared. No episode is played afterwards."""
        ...
