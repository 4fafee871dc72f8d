"""A host: what plays several episodes at once somewhere else, and may die at any time."""

from __future__ import annotations

from typing import Protocol

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult


class HostDied(Exception):
    """The process or node of a host is gone, or it did not answer any more; the text says how it ended."""


class Host(Protocol):
    """One process with an event loop. `kill` may be called at any time, and makes all other calls raise HostDied."""

    async def start(self, plan: EpisodePlan) -> None:
        """Start it and let it make the agent of `plan`. Raises HostDied if it cannot be started."""
        ...

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        """Play an episode there. Raises HostDied: the session has to be ended then. Cancelling it ends the session."""
        ...

    async def ping(self) -> int:
        """Wait for an answer of its event loop: how many threads of episodes that are over still run. Raises
        HostDied.
        """
        ...

    async def kill(self, reason: str) -> None:
        """End it and what it has started at once, whatever it does."""
        ...

    async def close(self) -> None:
        """Let it close its agents, and end it."""
        ...
