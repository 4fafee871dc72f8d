"""ROLL's runners: each plays one episode at a time, in its own thread, and is reused for later episodes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from tokengrove.client import Client
from tokengrove.client.exit_reason import storable
from tokengrove.errors import InvalidRequest
from tokengrove.roll.managers.episode_session import storable_metrics, zipped
from tokengrove.roll.managers.runner_slot import RunnerSlot
from tokengrove.roll.values import Section
from tokengrove.roll.values.episode_result import EpisodeResult, InvalidResult, check_scores, not_a_result, status_of
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes import Episode, EpisodeEnded
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.episodes.task_fields import seed_of
from tokengrove.rollout.named_arguments import parameters
from tokengrove.rollout.threads import in_thread
from tokengrove.rollout.trajectory import complete, read_tree

_logger = logging.getLogger(__name__)


class RunnerAgent:
    """Plays with a class that has `run_job(seed)`, such as a subclass of AgentRunner.

    `arguments` are its `env_config`. There is one runner per concurrent episode. Its `setup` is called before its first
    episode, and `close` tears all runners down. The seed is the row's `seed`, or is derived from the task's id, so that
    a group plays one seed. The score of each step is the reward of its turn, as in ProxyEnvManager.
    """

    def __init__(self, runner: Any, arguments: Mapping[str, Any], name: str) -> None:
        if not isinstance(runner, type):
            raise InvalidRequest(f"{name} is an instance; name its class: each episode has a runner", param="agent")
        names = {each.name for each in parameters(runner)}
        if not any(each.kind is each.VAR_KEYWORD for each in parameters(runner)) and "env_config" not in names:
            raise InvalidRequest(f"{name} takes no 'env_config'; runners are made as AgentRunner is", param="agent")
        self._runner, self._env_config, self.name = runner, Section(arguments), name
        self._idle: list[RunnerSlot] = []
        self._clients: dict[tuple[str, int], Client] = {}
        self._numbers, self._lock = itertools.count(), threading.Lock()

    async def play(self, episode: Episode) -> Reward:
        """Play one episode. Raises EpisodeEnded if the result is not Finished, after the rewards are set."""
        slot = self._idle.pop() if self._idle else await self._made(episode)
        result = await self._result(slot, episode)
        self._idle.append(slot)
        about = {**result.metrics, "score": result.score}
        episode.ending["metrics"] = storable_metrics(about)
        if result.agent_exit_reason:
            episode.ending["exit_reason"] = storable(str(result.agent_exit_reason))
        reward = await _earned(result, episode)
        if result.status == "Finished":
            return reward
        if reward is not None:
            await episode.session.set_reward(reward)
        raise _ended(result, self.name) from result.error

    async def close(self) -> None:
        """Tear down the runners. Each may take half a minute; one that hangs is abandoned."""
        idle, self._idle = self._idle, []
        await asyncio.gather(*(in_thread(slot.teardown) for slot in idle))
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    async def _made(self, episode: Episode) -> RunnerSlot:
        """A new runner in its own thread. Raises the errors of its constructor and its `setup`."""
        number = next(self._numbers)
        env_config = Section({"group_id": 0, "tag": self.name, **self._env_config, "env_id": number})
        client = self._client(episode)

        def make() -> RunnerSlot:
            slot = RunnerSlot(self._runner, client, env_config, None, self._lock)
            try:
                slot.setup()
            except BaseException:
                slot.abandon()
                raise
            return slot

        making = asyncio.ensure_future(in_thread(make))
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            making.add_done_callback(_abandon)
            raise

    async def _result(self, slot: RunnerSlot, episode: Episode) -> EpisodeResult:
        slot.address(episode.session.root_url, episode.session.api_key)
        if episode.plan.validation or getattr(slot.runner, "mode", None) == "val":  # left by an earlier episode
            with suppress(AttributeError):  # the class has slots
                slot.runner.mode = "val" if episode.plan.validation else "train"
        try:
            # Shielded: a cancelled future would not take the result of the thread, which continues.
            result: Any = await asyncio.shield(asyncio.wrap_future(slot.play(seed_of(episode.task))))
            return _checked(result, self.name)
        except BaseException:
            await to_the_end(in_thread(slot.abandon))
            raise

    def _client(self, episode: Episode) -> Client:
        """The client that gives runners an HTTP client if the server is in this process. It has no key."""
        app = episode.client.app
        key = episode.client.url, id(app)
        if key not in self._clients:
            self._clients[key] = Client(None if app else episode.client.url, app=app)
        return self._clients[key]


def _abandon(making: asyncio.Future[RunnerSlot]) -> None:
    if not making.cancelled() and making.exception() is None:
        making.result().abandon()


def _checked(result: Any, name: str) -> EpisodeResult:
    try:
        scores = [float(score) for score in getattr(result, "step_scores", None) or ()]
        reason = str(getattr(result, "agent_exit_reason", "") or "")
        metrics = getattr(result, "metrics", None) or {}
        checked = EpisodeResult(status_of(result), float(result.score), scores, reason, metrics)
        check_scores(checked)
    except InvalidResult as error:
        raise InvalidResult(f"{name}: {error}") from None
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidResult(f"{name}: {not_a_result(result, error)}") from None
    checked.error = getattr(result, "error", None)
    return checked


async def _earned(result: EpisodeResult, episode: Episode) -> float | None:
    """Set the scores of steps, if there are any; else return the reward of the last turn.

    The score of the episode is the score of the result, whatever the sum of its steps.
    """
    turns = len(complete(await read_tree(episode.client, episode.session.session_id)))
    if not turns:
        return None
    episode.ending["score"] = result.score
    if not result.step_scores:
        return result.score
    scores = zipped(result.step_scores, turns)
    await episode.session.set_reward(step_scores=scores, align="first")
    return None


def _ended(result: EpisodeResult, name: str) -> EpisodeEnded:
    reason = str(result.agent_exit_reason) or f"{name} gave no reason"
    if result.status == "NoData":
        return EpisodeEnded("NoData", reason)
    if result.status == "Timeout":
        return EpisodeEnded("Timeout", reason)
    return EpisodeEnded("Failed", reason)
