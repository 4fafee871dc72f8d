"""Retries of failed episodes; the sessions of failed attempts are discarded."""

from __future__ import annotations

from dataclasses import replace

from tokengrove.rollout.episodes import EpisodePlan, EpisodeResult, FailureKind
from tokengrove.rollout.executors import Executor
from tokengrove.rollout.session_start import unused_session_id

AGAIN: frozenset[FailureKind] = frozenset({"agent", "no_data", "reward", "scorer", "server", "timeout", "worker"})
"""Failures after which an episode is retried."""


async def play_until_it_ends(executor: Executor, plan: EpisodePlan, retries: int) -> EpisodeResult:
    """Play an episode, with up to `retries` retries; return the result of the last attempt."""
    for attempt in range(retries):
        result = await executor.play(replace(_numbered(plan, attempt), discard=AGAIN))
        if result.failure not in AGAIN:
            return result
    return await executor.play(_numbered(plan, retries))


def _numbered(plan: EpisodePlan, attempt: int) -> EpisodePlan:
    """The plan of an attempt: each has its own session."""
    if not attempt:
        return plan
    return replace(plan, attempt=attempt, session_id=unused_session_id(plan.session_id))
