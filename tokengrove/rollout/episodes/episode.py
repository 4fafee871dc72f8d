"""A running episode of a plan: its session has been started, and its agent plays."""

from __future__ import annotations

from tokengrove.client import AsyncClient, AsyncSession
from tokengrove.client.options import EndOptions
from tokengrove.rollout import episode
from tokengrove.rollout.episodes.plan import EpisodePlan
from tokengrove.rollout.episodes.task import Task


class Episode(episode.Episode):
    """What an agent's adapter needs. `client` has the control key: nothing of it may reach the agent itself, which gets
    `session.base_url`, `session.root_url` and `session.api_key` only.

    `ending`: fields of the session's end that an adapter knows, such as `metrics`, `exit_reason` and `finished`.
    `scores`: further values by name that the agent's own verifier gives; the result has them beside those of scorers.
    """

    def __init__(self, plan: EpisodePlan, session: AsyncSession, client: AsyncClient) -> None:
        super().__init__(client, session)
        self.plan = plan
        self.ending = EndOptions()
        self.scores: dict[str, float] = {}

    @property
    def task(self) -> Task:
        return self.plan.task
