"""An episode of several agents: one session each, or one session that they share, rewarded and exported by agent.

Either way the turns carry the name of their agent, and the sessions start, fail and end together: whatever happens in
the `async with` block, no session of the episode stays open.
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
"""After an exception, which its caller should get soon."""
_OWN_METADATA = ("episode", "agent")


class TeamEndOptions(TypedDict, total=False):
    """What the environment says of an episode at its end, as in `EndOptions`."""

    outcome: str
    exit_reason: str
    metrics: Mapping[str, Json]
    finished: bool


@dataclass(frozen=True, slots=True)
class Member:
    """What one agent of a team gets: an address that marks its turns with its name, and the agent's key.

    `session` has the control key too, so it stays with the environment.
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
        """The agent's key; a shared session has one for all agents."""
        return self.session.api_key

    @property
    def headers(self) -> dict[str, str]:
        """What marks the turns of an agent that uses another address of its session than `base_url`."""
        return {"x-tokengrove-agent": self.name}

    @property
    def variables(self) -> dict[str, str | None]:
        """The environment variables of an agent that is a program of its own; None: the variable has to be absent."""
        return agent_variables(self)


class Team:
    """The agents of one episode, by name: `team["coder"].base_url`. Use it in an `async with` block.

    `shared`: one session for all agents instead of one for each; conversations then stand in one tree, and limits hold
    for all together. `episode_id` (default: a random one) is in the metadata of every session as `episode`; in a
    session of its own an agent is there as `agent`. The other arguments are fields of `start_session`: `group_id` is
    that of all sessions; `group_size` counts episodes; `session_id` is the beginning of the ids of several sessions.
    A start waits up to `start_timeout_s` seconds for room.

    Raises InvalidRequest for names that are empty, repeated or have other characters than A-Z a-z 0-9 _ . : + -
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
        """The agent of this name. Raises InvalidRequest for another name, and ValueError before the start."""
        if agent not in self._agents:
            raise InvalidRequest(f"the team has no agent {agent!r}; it has {', '.join(self._agents)}", param="agent")
        if agent not in self._members:
            raise ValueError("the episode has not started: use `async with` first")
        return self._members[agent]

    @property
    def members(self) -> tuple[Member, ...]:
        """All agents in their order; none before the start."""
        return tuple(self._members.values())

    @property
    def session_ids(self) -> tuple[str, ...]:
        """The sessions of the episode: one, or one for each agent in their order."""
        return tuple(episode.session_id for episode in self._episodes)

    async def __aenter__(self) -> Team:
        if self._episodes:
            raise ValueError(f"episode {self.episode_id!r} was started by this team: make another one")
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
        """Reward an agent: `agent` names it, and the rest is as in `AsyncSession.set_reward`.

        Without `agent` the reward is that of the whole team: each agent that has a complete turn gets it. Raises
        NotFound for an agent without one, and if nobody has one.
        """
        if (agent := options.get("agent")) is not None:
            await self[agent].session.set_reward(reward, **options)
            return
        if wrong := sorted(options.keys() - {"agent", "name"}):
            raise InvalidRequest(f"{wrong[0]!r} names turns of one agent: give 'agent' too", param="agent")
        rewarded = [await self._reward_if_any(member, reward, options.get("name")) for member in self.members]
        if not any(rewarded):
            raise NotFound(f"no agent of episode {self.episode_id!r} has a complete turn to reward", param="agent")

    async def end(
        self,
        rewards: Mapping[str, Number] | Number | None = None,
        **options: Unpack[TeamEndOptions],
    ) -> None:
        """Reward the agents by name (or all of them by one number), then end all sessions with the same `options`.

        An agent that has no complete turn has nothing to reward, which is logged. Raises InvalidRequest for a name
        that the team has not, before anything is sent.
        """
        by_name = rewards if isinstance(rewards, Mapping) else dict.fromkeys(self._agents, rewards)
        found = {self[name]: reward for name, reward in by_name.items() if reward is not None}
        for member, reward in found.items():
            if not await self._reward_if_any(member, reward, None):
                logger.warning("agent %s of episode %s has no turn to reward", member.name, self.episode_id)
        for episode in self._episodes:
            await episode.end(**options)

    async def export(self, **options: Unpack[ExportOptions]) -> Export:
        """Return the samples of the episode, each with its `agent` and, by default, with that agent's rewards.

        To compare agents, export the whole group with `reward_scope="agent"` and `advantages`.
        """
        how: ExportOptions = {"reward_scope": "agent", **options}
        return await self._client.export(session_ids=self.session_ids, **how)

    def _options_of(self, agent: str | None) -> SessionOptions:
        """The options of the session of one agent, or of the shared one."""
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
        """End all sessions that are open; as Failed with the reason after an `error`.

        Raises the first error of an end, but none after an `error`: that one is raised by the caller.
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
    """Raise InvalidRequest for what no episode can be made of."""
    if isinstance(agents, str) or not agents:
        raise InvalidRequest("'agents' must be a list with the name of at least one agent", param="agents")
    for name in agents:
        if not _NAME.fullmatch(name):
            message = f"{name!r} is no name of an agent: 1 to 64 characters of A-Z a-z 0-9 _ . : + -"
            raise InvalidRequest(message, param="agents")
    if len(set(agents)) < len(agents):
        raise InvalidRequest("two agents have the same name, so their turns could not be told apart", param="agents")
    if "api_key" in options and not shared:
        raise InvalidRequest("'api_key' can belong to one session only: leave it out, or share one", param="api_key")
    if taken := sorted(options.get("metadata", {}).keys() & set(_OWN_METADATA)):
        raise InvalidRequest(f"'metadata.{taken[0]}' is set by the team: give it another name", param="metadata")
