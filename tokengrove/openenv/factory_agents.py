"""OpenEnv's factories as agents of episodes: their requests are sampled in the session of the episode."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any

from tokengrove.openenv.react import ReAct
from tokengrove.openenv.resources import open_resource
from tokengrove.openenv.turn_call import complete
from tokengrove.openenv.verified import reward_of
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.contract import AgentSession, AgentSessionFactory
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.agent_access import agent_access
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.threads import in_thread


class SessionFactoryAgent:
    """Plays an `AgentSessionFactory` of the contract: `task` is the row of the data, `rollout_id` the session's id, and
    the `env_reward` of `verify` the reward.
    """

    def __init__(self, factory: AgentSessionFactory) -> None:
        self._factory = factory

    async def play(self, episode: Episode) -> Reward:
        """Play one episode. The session of the factory is closed in any case."""
        create = partial(self._factory.create, task=dict(episode.task.data), rollout_id=episode.session.session_id)
        session = await _made(create)
        try:
            return await _play(session, episode)
        finally:
            await to_the_end(in_thread(session.close))

    async def close(self) -> None:
        """Close the factory, if it has `close`."""
        await _closed(self._factory)


async def _play(session: AgentSession, episode: Episode) -> Reward:
    turn = 0
    while (intercept := await in_thread(session.next_request)) is not None:
        messages, tools = intercept["messages"], intercept.get("tools")
        text = await episode.client.run(complete(episode.session, turn, messages, tools, intercept.get("sampling")))
        await in_thread(partial(session.deliver, intercept, text))
        turn += 1
    return reward_of(await in_thread(session.verify))


class ResourceFactoryAgent:
    """Plays openenv's `ResourceSessionFactory`: the ReAct harness with the model of the episode, for up to `max_turns`
    turns. The environment's `verify` returns the reward.
    """

    def __init__(self, factory: Any, max_turns: int = 10) -> None:
        self._factory, self._max_turns = factory, max_turns

    async def play(self, episode: Episode) -> Reward:
        """Play one episode. The environment is closed in any case."""
        episode_id = episode.session.session_id
        resource = await _made(partial(open_resource, self._factory, dict(episode.task.data), episode_id))
        harness = ReAct(resource, self._max_turns)
        try:
            async with AsyncExitStack() as stack:
                access = agent_access(("base_url", "api_key", "http_client"), episode, stack, blocking=True)
                told = await in_thread(partial(harness, None, **access))
            return reward_of(await in_thread(partial(resource.verify, told.messages, told.final_state())))
        finally:
            await to_the_end(in_thread(resource.close))

    async def close(self) -> None:
        """Close the factory, if it has `close`."""
        await _closed(self._factory)


async def _made(create: Any) -> Any:
    """The result of `create`, which runs in a thread. After a cancellation its late result is closed."""
    making = asyncio.ensure_future(in_thread(create))
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        with suppress(Exception):
            late = await to_the_end(_awaited(making))
            await to_the_end(in_thread(late.close))
        raise


async def _awaited(making: asyncio.Future[Any]) -> Any:
    return await making


async def _closed(factory: Any) -> None:
    close = getattr(factory, "close", None)
    if callable(close):
        await in_thread(close)
