"""The interface of executors."""

from __future__ import annotations

from typing import Protocol, Self

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult


class Executor(Protocol):
    """Plays episodes on one event loop, at most `concurrency` at once; `play` waits for a place.

    `play` returns the result of an attempt, whatever happens to it, and raises only CancelledError. If a process or
    node dies, the result has `failure="worker"`, and the session has been ended or withdrawn; the caller decides
    whether to retry. Cancelling `play` ends the episode and its session, wherever it runs.
    """

    async def play(self, plan: EpisodePlan) -> EpisodeResult: ...

    async def close(self) -> None:
        """End all running episodes and the processes that they run in. Nothing is played afterwards. May be called
        again.
        """
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, *_: object) -> None: ...
