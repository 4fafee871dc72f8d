"""OpenEnv environments with MCP tools, played through openenv's own client, with a connection for each episode."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.openenv import ResourceFactoryAgent, ToolEnvironment
from tokengrove.rollout.episodes import Agent
from tokengrove.rollout.named_arguments import check_construction


def client_agent(found: Any, arguments: Mapping[str, Any], name: str) -> Agent:
    """The agent that plays the environment of a client, `openenv.core:MCPToolClient` or a subclass, in a ReAct harness.

    `arguments`: arguments of the client (`base_url`, ...), and `max_turns` (default 10). Raises InvalidRequest for
    other classes of openenv: only a factory of sessions can describe their actions.
    """
    if not isinstance(found, type) or not callable(getattr(found, "list_tools", None)):
        raise InvalidRequest(
            f"{name!r} is an environment of OpenEnv without MCP tools; give a factory of its sessions, "
            "create(task, seed, episode_id), or a subclass of its MCPToolClient",
            param="agent",
        )
    given = dict(arguments)
    max_turns = int(given.pop("max_turns", 10))
    check_construction(found, given, name)
    return ResourceFactoryAgent(_Connections(found, given), max_turns)


class _Connections:
    """Creates a connection for each episode, with the interface of openenv's `ResourceSessionFactory`."""

    def __init__(self, client: type, arguments: Mapping[str, Any]) -> None:
        self._client, self._arguments = client, arguments

    def create(self, task: Any, seed: int | None = None, episode_id: str | None = None) -> ToolEnvironment:
        return ToolEnvironment(self._client(**self._arguments), task, seed=seed, episode_id=episode_id)
