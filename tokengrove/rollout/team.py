"""An episode of several agents: one session for each agent or one shared session, rewarded and exported by agent.

In both cases turns have the name of their agent, and the sessions start, fail and end together: after the `async with`
block, no session of the episode is open.
"""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypedDict, Unpack

from tokengrove.client import AsyncClient, AsyncSession, Export
from tokengrove.client.options import ExportOptions, RewardOptions, SessionOptions
from tokengrove.client.values import Json, Number
from tokengrove.errors import InvalidRequest, NotFound, ProxyError
from tokengrove.rollout.cancellation import to_the_end
from tokengrove.rollout.environment import agent_variables
from tokengrove.rollout.episode import Episode

logger = logging.getLogger(__name__)
_NAME = re.compile(r"[A-Za-z0-9_.:+-]{1,64}")
_RETRY_FAILED_S = 10.0
"""Seconds of retries after an exception, so that the caller gets the exception soon."""
_OWN_METADATA = ("episode", "agent")


class TeamEndOptions(TypedDict, total=False):
    """The options of an episode's end, as in `EndOptions`."""

    outcome: str
    exit_reason: str
    metrics: Mapping[str, Json]
    finished: bool


@dataclass(frozen=True, slots=True)
class Member:
    """The access of one agent of a team: addresses that mark its turns with its name, and the agent's key.

    `session` also has the control key, so it must stay with the environment.
    """

    name: str
    session: AsyncSession

    @property
    def base_url(self) -> str:
        """The agent's address for OpenAI's SDKs; it ends in /v1."""
        return f"{self.root_url}/v1"

    @property
    def root_url(self) -> str:
        """The agent's address without /v1, for Anthropic's SDK."""
        return f"{self.session.root_url}@{self.name}"

    @property
    def api_key(self) -> str:
        """The agent's key. The agents of a shared session have the same key."""
        return self.session.api_key

    @property
    def headers(self) -> dict[str, str]:
        """Headers that mark the agent's turns if it uses another address of its session than `base_url`."""
        return {"x-tokengrove-agent": self.name}

    @property
    def variables(self) -> dict[str, str | None]:
        """The environment variables of an agent that is a separate program; None: the variable must be unset."""
        return agent_variables(self)


class Team:
    """The agents of one episode, by name: `team["coder"].base_url`. Use it in an `async with` block.

    `shared`: one session for all agents instead of one for each; all conversations are then in one tree, and limits
    apply to all agents together. `episode_id` (default: a random id) is stored in the metadata of every session as
    `episode`; the session of a single agent also has its name as `agent`. The other arguments are fields of
    `start_session`: `group_id` applies to all sessions; `group_size` counts episodes; `session_id` is the prefix of the
    ids if there are several sessions. Each start waits up to `start_timeout_s` seconds for a place.

    Raises InvalidRequest for names that are empty, repeated or have other characters than A-Z a-z 0-9 _ . : + -, for an
    `api_key` without `shared`, and for `metadata` with `episode` or `agent`.
    """

    def __init__(
        self,
        client: AsyncClient,
        task_id: str,
        agents: Sequence[str],
        *,
        shared: bool = False,
        episode_id: str | None = None,
        start_timeout_s: float = 600.0,
        **options: Unpack[SessionOptions],
    ) -> None:
        _check(agents, options, shared)
        self.episode_id = uuid.uuid4().hex if episode_id is None else episode_id
        self.shared = shared
        self._client, self._task_id, self._agents = client, task_id, tuple(agents)
        self._options, self._start_timeout_s = options, start_timeout_s
        self._episodes: list[Episode] = []
        self._members: dict[str, Member] = {}

    def __getitem__(self, agent: str) -> Member:
        """The agent with this name. Raises InvalidRequest for an unknown name, and ValueError before the start."""
        if agent not in self._agents:
            raise InvalidRequest(f"the team has no agent {agent!r}; it has {', '.join(self._agents)}", param="agent")
        if agent not in self._members:
            raise ValueError("the episode has not started: use `async with` first")
        return self._members[agent]

    @property
    def members(self) -> tuple[Member, ...]:
        """All agents in order; empty before the start."""
        return tuple(self._members.values())

    @property
    def session_ids(self) -> tuple[str, ...]:
        """The ids of the sessions: the shared session, or the session of each agent in order."""
        return tuple(episode.session_id for episode in self._episodes)

    async def __aenter__(self) -> Team:
        if self._episodes:
            raise ValueError(f"this team has already started episode {self.episode_id!r}: make another Team")
        try:
            for agent in (None,) if self.shared else self._agents:
                options = self._options_of(agent)
                episode = await Episode.start(
                    self._client, self._task_id, options, delivery="queue", within_s=self._start_timeout_s
                )
                self._episodes.append(episode)
                names = self._agents if agent is None else (agent,)
                self._members |= {name: Member(name, episode.session) for name in names}
        except BaseException as error:
            await self._leave(error)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._leave(error)

    async def set_reward(self, reward: Number | None = None, **options: Unpack[RewardOptions]) -> None:
        """Reward an agent, which `agent` names. The other arguments are as in `AsyncSession.set_reward`.

        Without `agent`, each agent that has a complete turn gets the reward. Raises NotFound if the named agent, or
        every agent, lacks a complete turn.
        """
        if (agent := options.get("agent")) is not None:
            await self[agent].session.set_reward(reward, **options)
            return
        if wrong := sorted(options.keys() - {"agent", "name"}):
            raise InvalidRequest(f"{wrong[0]!r} names turns of one agent: also give 'agent'", param="agent")
        rewarded = [await self._reward_if_any(member, reward, options.get("name")) for member in self.members]
        if not any(rewarded):
            raise NotFound(f"no agent of episode {self.episode_id!r} has a complete turn to reward", param="agent")

    async def end(
        self,
        rewards: Mapping[str, Number] | Number | None = None,
        **options: Unpack[TeamEndOptions],
    ) -> None:
        """Reward the agents by name (or all agents with one number), then end all sessions with the same `options`.

        A reward for an agent without a complete turn is not set, and a warning is logged. Raises InvalidRequest for an
        unknown name, before anything is sent.
        """
        by_name = rewards if isinstance(rewards, Mapping) else dict.fromkeys(self._agents, rewards)
        found = {self[name]: reward for name, reward in by_name.items() if reward is not None}
        for member, reward in found.items():
            if not await self._reward_if_any(member, reward, None):
                logger.warning("agent %s of episode %s has no turn to reward", member.name, self.episode_id)
        for episode in self._episodes:
            await episode.end(**options)

    async def export(self, **options: Unpack[ExportOptions]) -> Export:
        """Return the samples of the episode, each with its `agent` and, by default, with the rewards of this agent.

        To compare agents, export the whole group with `reward_scope="agent"` and `advantages`.
        """
        how: ExportOptions = {"reward_scope": "agent", **options}
        return await self._client.export(session_ids=self.session_ids, **how)

    def _options_of(self, agent: str | None) -> SessionOptions:
        """The options of one agent's session, or of the shared session (None)."""
        options: SessionOptions = {**self._options}
        options["session_id"] = options.get("session_id", f"episode-{self.episode_id}")
        own = {"episode": self.episode_id}
        if agent is not None:
            options["session_id"] += f"-{agent}"
            own["agent"] = agent
            if "group_size" in options:
                options["group_size"] *= len(self._agents)
        options["metadata"] = {**options.get("metadata", {}), **own}
        return options

    async def _reward_if_any(self, member: Member, reward: Number | None, name: str | None) -> bool:
        """Reward an agent; return False if it has no complete turn."""
        options: RewardOptions = {"agent": member.name}
        if name is not None:
            options["name"] = name
        try:
            await member.session.set_reward(reward, **options)
        except NotFound as error:
            if error.param != "agent":
                raise
            return False
        return True

    async def _leave(self, error: BaseException | None) -> None:
        """End all open sessions. After an `error` they end as Failed, with its reason.

        If a session cannot be ended, the first failure is raised; after an `error`, failures are only logged.
        """
        if error is not None:
            await to_the_end(self._fail_all(error))
        elif failures := await to_the_end(self._end_all()):
            raise failures[0]

    async def _fail_all(self, error: BaseException) -> None:
        for episode in self._episodes:
            await episode.fail(error, within_s=_RETRY_FAILED_S)

    async def _end_all(self) -> list[ProxyError]:
        failures = []
        for episode in self._episodes:
            try:
                if not episode.ended:
                    await episode.end()
            except ProxyError as failure:
                failures.append(failure)
        return failures


def _check(agents: Sequence[str], options: SessionOptions, shared: bool) -> None:
    """Raise InvalidRequest for invalid arguments of a team."""
    if isinstance(agents, str) or not agents:
        raise InvalidRequest("'agents' must be a list with the name of at least one agent", param="agents")
    for name in agents:
        if not _NAME.fullmatch(name):
            message = f"{name!r} is not a valid name of an agent: 1 to 64 characters of A-Z a-z 0-9 _ . : + -"
            raise InvalidRequest(message, param="agents")
    if len(set(agents)) < len(agents):
        raise InvalidRequest("two agents have the same name: give each agent its own name", param="agents")
    if "api_key" in options and not shared:
        raise InvalidRequest("'api_key' can belong to one session only: leave it out, or share one", param="api_key")
    if taken := sorted(options.get("metadata", {}).keys() & set(_OWN_METADATA)):
        raise InvalidRequest(f"'metadata.{taken[0]}' is set by the team: use another name", param="metadata")
