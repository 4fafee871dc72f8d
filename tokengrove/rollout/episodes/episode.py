"""A running episode of a plan: its session has started, and its agent plays."""

from __future__ import annotations

from tokengrove.client import AsyncClient, AsyncSession
from tokengrove.client.options import EndOptions
from tokengrove.rollout import episode
from tokengrove.rollout.episodes.plan import EpisodePlan
from tokengrove.rollout.episodes.task import Task


class Episode(episode.Episode):
    """The episode that an agent's adapter gets.

    `client` and `session` have the control key, so an adapter passes only `session.base_url`, `session.root_url` and
    `session.api_key` to the agent. `ending`: fields for the end of the session that an adapter sets, such as `metrics`,
    `exit_reason` and `finished`. `scores`: further values by name from the agent's own verifier, which the result has
    in addition to the scorers' scores.
    """

    def __init__(self, plan: EpisodePlan, session: AsyncSession, client: AsyncClient) -> None:
        super().__init__(client, session)
        self.plan = plan
        self.ending = EndOptions()
        self.scores: dict[str, float] = {}

    @property
    def task(self) -> Task:
        return self.plan.task
