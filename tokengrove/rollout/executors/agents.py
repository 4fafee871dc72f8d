"""The agents of one process. Each is created once, and closed with the process."""

from __future__ import annotations

import logging

from tokengrove.client.exit_reason import exit_reason
from tokengrove.rollout.episodes import Agent, AgentSpec, EpisodePlan, EpisodeResult, play, resolve_agent
from tokengrove.rollout.executors.clients import Clients
from tokengrove.rollout.executors.results import end_lost_session, failed

logger = logging.getLogger(__name__)


class Agents:
    """Creates agents from specs, and plays episodes with them. For one event loop."""

    def __init__(self) -> None:
        self._made: list[tuple[object, Agent | str]] = []
        self._clients = Clients()

    def make(self, spec: AgentSpec, key: object = None) -> Agent | str:
        """The agent of a spec, or the reason why it cannot be created. A failed creation is not retried.

        `key`: specs with equal keys share an agent; None: the spec is its own key.
        """
        key = spec if key is None else key
        for known, agent in self._made:
            if known == key:
                return agent
        made = _made(spec)
        self._made.append((key, made))
        return made

    async def play(self, plan: EpisodePlan, key: object = None) -> EpisodeResult:
        """Play an episode. Without an agent, it fails before a session is started."""
        agent = self.make(plan.agent, key)
        if isinstance(agent, str):
            return failed(plan, "agent", f"the agent cannot be created: {agent}")
        try:
            with self._clients.client(plan.server) as client:
                return await play(plan, agent, client)
        except Exception as error:  # internal: errors of agents, rewards and servers are in the result
            logger.exception("the episode of session %s could not be played", plan.session_id)
            await end_lost_session(plan, "agent", exit_reason(error))
            return failed(plan, "agent", f"the episode could not be played: {exit_reason(error)}")

    async def close(self) -> None:
        """Close all agents and connections. Exceptions of agents are logged."""
        made, self._made = self._made, []
        for _, agent in made:
            if not isinstance(agent, str):
                try:
                    await agent.close()
                except Exception:
                    logger.exception("an agent could not be closed")
        await self._clients.close()


def _made(spec: AgentSpec) -> Agent | str:
    try:
        return resolve_agent(spec)
    except (Exception, SystemExit) as error:  # a module may exit when it is imported
        logger.exception("the agent %s cannot be created", spec.target or " ".join(spec.words))
        return exit_reason(error)
