"""What every kind of agent is made into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from tokengrove.rollout.episodes.episode import Episode

Reward = float | Mapping[str, float] | None
"""The reward of the session, rewards by interaction id, or None: the agent sets its rewards itself, or has none."""


class Agent(Protocol):
    """Plays episodes, several at once."""

    async def play(self, episode: Episode) -> Reward:
        """Play one episode to its end and return its reward. What it raises makes the episode a failed one; it is
        cancelled when the time of the episode is over, and leaves no process or thread behind then.
        """
        ...

    async def close(self) -> None:
        """Release what the episodes shared. Nothing is played afterwards."""
        ...
