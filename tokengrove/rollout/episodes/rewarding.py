"""Rewards an episode after its agent has ended: the reward of the agent or of the reward function, then the scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tokengrove.client import SessionTree
from tokengrove.client.exit_reason import exit_reason
from tokengrove.errors import InvalidRequest, NotFound
from tokengrove.rollout.episodes.episode import Episode
from tokengrove.rollout.episodes.failure import Failure
from tokengrove.rollout.episodes.plan import EpisodePlan
from tokengrove.rollout.episodes.result import FailureKind
from tokengrove.rollout.episodes.reward_function import RewardFunction
from tokengrove.rollout.failure_log import FailedEpisode
from tokengrove.rollout.failures import AgentFailed
from tokengrove.rollout.returned_rewards import returned_rewards
from tokengrove.rollout.scorers import load_scorer, score_trajectory
from tokengrove.rollout.scorers.scoring import check_names
from tokengrove.rollout.trajectory import complete, read_trajectory, read_tree

Rewards = float | dict[str, float] | None


class Rewarding:
    """The rewards of one episode. `plan` has the row as it was read; the agent may have changed its own copy."""

    def __init__(self, episode: Episode, plan: EpisodePlan) -> None:
        self._episode, self._plan = episode, plan

    async def reward(self, returned: Any) -> Failure | None:
        """Set the rewards; return the first failure. Raises ProxyError if the server does not read or set them.

        Without a complete turn, the failure is `no_data`. With a reward function, the agent's own reward is used only
        if the function returns None.
        """
        try:
            of_agent = returned_rewards(returned, "the agent")
        except (TypeError, ValueError) as error:
            return Failure("agent", exit_reason(error))
        tree = await read_tree(self._episode.client, self._episode.session.session_id)
        if not complete(tree):
            reason = self._episode.ending.get("exit_reason")
            told = "the agent ended without a complete turn"
            return Failure("no_data", f"{told}: {reason}" if reason else told, "NoData")
        return (
            await self._set_scores(self._episode.scores)
            or await self._rewarded(tree, of_agent)
            or await self._scored(tree)
        )

    async def _set_scores(self, scores: Mapping[str, float]) -> Failure | None:
        """Record further values of the agent or the reward function as named rewards, so that exports contain them."""
        session = self._episode.session
        for name, value in scores.items():
            try:
                await session.set_reward(value, name=name)
            except InvalidRequest as error:
                return Failure("reward", f"score {name!r}: {exit_reason(error)}")
        return None

    async def _rewarded(self, tree: SessionTree, of_agent: Rewards) -> Failure | None:
        if self._plan.reward is None:
            return await self._set(of_agent, "agent")
        return await self._by_function(self._plan.reward, tree, of_agent)

    async def _scored(self, tree: SessionTree) -> Failure | None:
        """Call the scorers of the plan and record their scores, also if some of them fail."""
        episode, plan = self._episode, self._plan
        if not plan.scorers:
            return None
        try:
            scorers = [load_scorer(path) for path in plan.scorers]
            check_names(scorers)
        except (InvalidRequest, ImportError) as error:
            return Failure("scorer", exit_reason(error))
        trajectory = await read_trajectory(episode.client, tree, plan.task.copied().data)
        scored = await score_trajectory(scorers, trajectory, self._record, plan.scoring_timeout_s, episode.client)
        episode.scores.update(scored.scores)
        if not scored.failures:
            return None
        more = f" (and {len(scored.failures) - 1} more)" if len(scored.failures) > 1 else ""
        return Failure("scorer", f"{scored.failures[0]}{more}")

    async def _record(self, body: Mapping[str, Any]) -> None:
        await self._episode.session.set_reward(**body)

    async def _by_function(self, path: str, tree: SessionTree, of_agent: Rewards) -> Failure | None:
        episode = self._episode
        try:
            function = RewardFunction.load(path)
            given, scores = await function.reward(episode.client, self._copied(), tree, of_agent)
        except Exception as error:
            told = str(error) if isinstance(error, AgentFailed) else exit_reason(error)
            return Failure("reward", f"{path}: {told}", traceback=FailedEpisode.by(error, "").traceback)
        if given is None:
            return await self._set(of_agent, "agent")
        episode.scores.update(scores)
        replaced = episode.ending.pop("score", None)
        if replaced is not None and not isinstance(
            given, dict
        ):  # replaces the agent's score; rewards of its steps stay
            episode.ending["score"] = given
        return await self._set_scores(scores) or await self._set(given, "reward")

    def _copied(self) -> EpisodePlan:
        return replace(self._plan, task=self._plan.task.copied())

    async def _set(self, rewards: Rewards, whose: FailureKind) -> Failure | None:
        """Set rewards. A reward for a turn that does not exist is a failure of kind `whose`."""
        session = self._episode.session
        try:
            if isinstance(rewards, dict):
                if rewards:
                    await session.set_reward(rewards=rewards)
            elif rewards is not None:
                await session.set_reward(rewards)
        except (InvalidRequest, NotFound) as error:
            return Failure(whose, exit_reason(error))
        return None
