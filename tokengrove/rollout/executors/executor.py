"""What every executor offers."""

from __future__ import annotations

from typing import Protocol, Self

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult


class Executor(Protocol):
    """Plays episodes on one event loop, at most `concurrency` at once: `play` waits while there is no place.

    `play` returns the result of an attempt, whatever happens to it; only cancellation is raised. A process or node that
    dies gives a result with `failure="worker"`, after the session was ended for it; the caller decides about another
    attempt. Cancelling `play` ends the episode, and its session, wherever it runs.
    """

    async def play(self, plan: EpisodePlan) -> EpisodeResult: ...

    async def close(self) -> None:
        """End all episodes that run, and what they run in. Nothing is played afterwards; closing again is harmless."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
