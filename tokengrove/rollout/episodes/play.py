"""Plays one episode: starts a session, lets the agent play, rewards, scores, and ends the session.

After a failure, the session ends as Failed, Timeout or NoData with the reason, and the result has the failure; only a
cancellation is raised. A session is Finished exactly if its result has no failure. The session of an attempt that will
be retried is withdrawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tokengrove.client import AsyncClient, SessionTree
from tokengrove.client.exit_reason import exit_reason, storable
from tokengrove.client.options import SessionOptions
from tokengrove.errors import ProxyError
from tokengrove.rollout import episode
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episode import Overdue
from tokengrove.rollout.episodes.agent import Agent
from tokengrove.rollout.episodes.ended import EpisodeEnded
from tokengrove.rollout.episodes.ending import CANCELLED, leave_session
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.episodes.failure import Failure, failure_of_agent
from tokengrove.rollout.episodes.plan import EpisodePlan
from tokengrove.rollout.episodes.result import EpisodeResult
from tokengrove.rollout.episodes.rewarding import Rewarding
from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.trajectory import complete, read_tree, score_of

_RETRY_CANCELLED_S = 10.0
"""Seconds in which the end of a cancelled episode is retried, while its caller waits."""


async def play(plan: EpisodePlan, agent: Agent, client: AsyncClient | None = None) -> EpisodeResult:
    """Play an attempt and return its result.

    `client`: a client of the plan's server with its admin key; None: a client is opened for this call. If it is a
    client of an application in this process (`AsyncClient(app=...)`), the plan's address is not used.

    A cancelled agent that does not end within ten seconds is closed at its current await; a blocking agent is left in
    its thread. Its session has then ended, so its key has no effect.
    """
    begun = time.monotonic()
    async with _connected(plan, client) as connected:
        try:
            started = await episode.Episode.start(
                connected,
                plan.task.task_id,
                _options(plan),
                delivery="queue",
                within_s=plan.start_timeout_s,
                discard=CANCELLED.kind in plan.discard,
            )
        except ProxyError as error:
            failure = Failure("server", f"no session could start: {exit_reason(error)}")
            return _result(plan, failure, begun)
        playing = Episode(replace(plan, task=plan.task.copied()), started.session, connected)
        return await _Playing(playing, plan, agent).result(begun)


class _Playing:
    """An episode whose session is live until `result` returns or raises."""

    def __init__(self, episode: Episode, plan: EpisodePlan, agent: Agent) -> None:
        self._episode, self._agent = episode, agent
        self._rewarding = Rewarding(episode, plan)
        self._tree: SessionTree | None = None
        self._reward: float | None = None

    async def result(self, begun: float) -> EpisodeResult:
        try:
            failure = await self._failure()
            failure = await self._read() or failure
        except BaseException:
            await to_the_end(leave_session(self._episode, CANCELLED, _RETRY_CANCELLED_S))
            raise
        failure = await to_the_end(leave_session(self._episode, failure, None))
        return _result(self._episode.plan, failure, begun, self._tree, self._reward, self._episode.scores)

    async def _failure(self) -> Failure | None:
        """Play, reward and score; return the first failure. Raises only a cancellation."""
        try:
            returned = await run_agent(self._agent, self._episode)
        except Exception as error:
            return failure_of_agent(error, (self._episode.client.url, self._episode.session.root_url))
        try:
            return await self._rewarding.reward(returned)
        except ProxyError as error:
            return Failure("server", exit_reason(error))

    async def _read(self) -> Failure | None:
        """Read the session's part of the result before the session ends. Return a failure if it cannot be read."""
        client, session_id = self._episode.client, self._episode.session.session_id
        try:
            self._tree = await read_tree(client, session_id)
            given = self._episode.ending.get("score")
            self._reward = score_of(self._tree) if given is None else float(given)
        except ProxyError as error:
            return Failure("server", exit_reason(error))
        return None


def _options(plan: EpisodePlan) -> SessionOptions:
    """The fields of the session's start. The metadata contain the task, sample, attempt and seed of the plan."""
    own = {"task_id": plan.task.task_id, "sample": plan.sample, "attempt": plan.attempt, "seed": plan.seed}
    metadata = {**own, **plan.options.get("metadata", {})}
    if plan.validation:
        metadata["validate"] = True
    options: SessionOptions = {"grant_capacity": True, **plan.options}
    options["session_id"], options["metadata"] = plan.session_id, metadata
    return options


@asynccontextmanager
async def _connected(plan: EpisodePlan, client: AsyncClient | None) -> AsyncIterator[AsyncClient]:
    if client is not None:
        yield client
    else:
        async with AsyncClient(plan.server.url, plan.server.admin_key) as own:
            yield own


def _result(
    plan: EpisodePlan,
    failure: Failure | None,
    begun: float,
    tree: SessionTree | None = None,
    reward: float | None = None,
    scores: dict[str, float] | None = None,
) -> EpisodeResult:
    nodes = [] if tree is None else complete(tree)
    return EpisodeResult(
        task_id=plan.task.task_id,
        sample=plan.sample,
        attempt=plan.attempt,
        session_id=plan.session_id,
        reward=reward,
        scores=scores or {},
        failure=None if failure is None else failure.kind,
        message=None if failure is None else storable(failure.message),
        turns=len(nodes),
        prompt_tokens=sum(node.prompt_tokens for node in nodes),
        output_tokens=sum(node.output_tokens for node in nodes),
        seconds=time.monotonic() - begun,
        traceback=(failure.traceback or None) if failure is not None else None,
    )


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
