"""An agent that plays the environments of a ROLL configuration. The task selects the environment and its seed."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from tokengrove.client import Client
from tokengrove.client.options import EndOptions
from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import AgenticConfig, resolve
from tokengrove.roll.episodes.environment_slot import EnvironmentSlot
from tokengrove.roll.episodes.given_session import SessionGiver
from tokengrove.roll.values import Section
from tokengrove.roll.values.score_metric import ScoreMetric, ScoreMetrics
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.episodes import Episode, EpisodeEnded, Server
from tokengrove.rollout.episodes.agent import Reward
from tokengrove.rollout.failure_log import FailedEpisode
from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.threads import in_thread

_CLOSE_S = 30.0
"""Seconds that the end of a run waits for the teardown of all environments."""
_UNFINISHED: Mapping[str, Literal["Failed", "NoData", "Timeout"]] = {"NoData": "NoData", "Timeout": "Timeout"}


class EnvironmentAgent:
    """`config`: the mapping of a ROLL configuration. `mode`: `train` or `val`, the manager whose environments play.

    The data of a task are `tag`, `group_id` and `seed`. Each running episode has an environment with its manager, and
    its runner if it has one, in a thread. They are kept for later episodes of the tag. Raises InvalidRequest for an
    invalid configuration.
    """

    def __init__(self, config: Mapping[str, Any], mode: str = "train") -> None:
        self._config, self._mode = AgenticConfig(config), mode
        self._manager_config = getattr(self._config, f"{mode}_env_manager")
        self._clients: dict[Server, Client] = {}
        self._free: dict[tuple[str, Server], list[EnvironmentSlot]] = defaultdict(list)
        self._slots: set[EnvironmentSlot] = set()
        self._numbers = itertools.count()
        self._score_metrics = ScoreMetrics()
        self._groups: dict[str, list[ScoreMetric]] = defaultdict(list)
        self._refused: InvalidRequest | None = None

    async def play(self, episode: Episode) -> Reward:
        """Play an episode. Raises EpisodeEnded if its outcome is not Finished, and its manager's exceptions.

        After a group without the metric that `reward_granularity` names, raises InvalidRequest for every episode.
        """
        if self._refused is not None:
            raise self._refused
        data, place = episode.task.data, (str(episode.task.data["tag"]), episode.plan.server)
        slot = self._slot(place)
        playing = slot.play(int(data["group_id"]), int(data["seed"]), episode.session)
        try:
            ending = await asyncio.wrap_future(playing)
            failure = slot.failure
        except asyncio.CancelledError:
            self._slots.discard(slot)
            await to_the_end(in_thread(slot.stop))
            raise
        except BaseException:
            self._slots.discard(slot)
            raise
        if ending is None or ending.get("outcome") == "NoData":
            self._slots.discard(slot)  # its loop ends
        else:
            self._free[place].append(slot)
            self._check(episode.task.task_id, slot.score_metric)
        return await _judged(episode, ending, failure)

    async def close(self) -> None:
        """Tear down all environments; wait at most half a minute."""
        slots, self._slots = self._slots, set()
        await asyncio.gather(*(in_thread(partial(slot.close, _CLOSE_S)) for slot in slots))
        for client in self._clients.values():
            client.close()
        self._clients.clear()

    def _check(self, task_id: str, metric: ScoreMetric | None) -> None:
        """Record the metric that scores an episode of a task, and check it when the group is complete."""
        if metric is None:
            return
        group = self._groups[task_id]
        group.append(metric)
        if len(group) < self._manager_config.group_size:
            return
        del self._groups[task_id]
        try:
            self._score_metrics.check(group)
        except InvalidRequest as error:
            self._refused = error
            raise

    def _slot(self, place: tuple[str, Server]) -> EnvironmentSlot:
        """A free slot of a tag, or a new one."""
        free = self._free[place]
        while free:
            if not (slot := free.pop()).is_done:
                return slot
            self._slots.discard(slot)
        tag, server = place
        if server not in self._clients:
            self._clients[server] = Client(server.url, server.admin_key)
        slot = EnvironmentSlot(partial(self._new_manager, tag), self._clients[server], f"tokengrove-{tag}")
        self._slots.add(slot)
        return slot

    def _new_manager(self, tag: str, client: SessionGiver, queue: EnvironmentSlot) -> Any:
        """A manager of the tag, whose environment has a unique number."""
        entries = (entry for envs in self._manager_config.env_configs.values() for entry in envs.values())
        entry = Section(next(entry for entry in entries if entry["tag"] == tag).to_dict())
        entry["env_id"] = next(self._numbers)
        manager = resolve(entry["env_manager_cls"], "env_manager_cls")(
            worker_config=self._manager_config,
            pipeline_config=self._config,
            env_config=entry,
            tokenizer=None,
            generate_scheduler=client,
            output_queue=queue,
            mode=self._mode,
        )
        manager.update_step(0, None)
        return manager


async def _judged(episode: Episode, ending: EndOptions | None, failure: FailedEpisode | None) -> Reward:
    """The reward that the manager gave at the end of the session. Raises EpisodeEnded for an outcome other than
    Finished, caused by `failure`.
    """
    if ending is None:
        raise EpisodeEnded("NoData", "the environment has no more episodes")
    for name in ("metrics", "exit_reason"):
        if name in ending:
            episode.ending[name] = ending[name]
    rewards, outcome = await _rewards(episode, ending), ending.get("outcome", "Finished")
    by_turn = isinstance(rewards, Mapping) and len(rewards) > 0
    if "score" in ending and (outcome == "Finished" or by_turn):
        episode.ending["score"] = ending["score"]
    if outcome == "Finished":
        return rewards
    if isinstance(rewards, Mapping) and rewards:
        await episode.session.set_reward(rewards=rewards)  # earned before the failure
    reason = ending.get("exit_reason") or f"the environment ended the episode as {outcome}"
    cause = None if failure is None else AgentFailed(failure.type, failure.message, failure.traceback)
    raise EpisodeEnded(_UNFINISHED.get(outcome, "Failed"), reason) from cause


async def _rewards(episode: Episode, ending: EndOptions) -> Reward:
    """Step scores are assigned to the turns in order, like the end of a session with `align: first`."""
    if "rewards" in ending:
        return {name: float(reward) for name, reward in ending["rewards"].items()}
    if "step_scores" not in ending:
        return float(ending["reward"]) if "reward" in ending else None
    tree = await episode.client.session_tree(episode.session.session_id)
    turns = [node.id for node in tree.interactions if node.is_step]
    return {name: float(score) for name, score in zip(turns, ending["step_scores"], strict=False)}
