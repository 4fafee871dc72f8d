"""A host: it plays several episodes at once in another process, and may die at any time."""

from __future__ import annotations

from typing import Protocol

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult


class HostDied(Exception):
    """The process or node of a host is gone or no longer answers; the message says how it ended."""


class Host(Protocol):
    """One process with an event loop. `kill` may be called at any time, and makes all other calls raise HostDied."""

    async def start(self, plan: EpisodePlan) -> None:
        """Start the host, and create the agent of `plan` there. Raises HostDied if the host cannot be started."""
        ...

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        """Play an episode. After HostDied, the caller must end the session. Cancelling `play` ends the session."""
        ...

    async def ping(self) -> int:
        """Wait for an answer of the event loop: the number of threads that still run after the end of their episodes.
        Raises HostDied.
        """
        ...

    async def kill(self, reason: str) -> None:
        """End the host and its children at once, whatever it does."""
        ...

    async def close(self) -> None:
        """Close the agents of the host, and end it."""
        ...
