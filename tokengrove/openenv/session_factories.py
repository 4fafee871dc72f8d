"""Factories of sessions around a harness: the user's own, or the ReAct harness with an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from tokengrove.client.options import SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.openenv.harness import FunctionHarness, Harness, harness_of
from tokengrove.openenv.harness_session import HarnessSession
from tokengrove.openenv.interception_server import InterceptionServer
from tokengrove.openenv.react import ReAct
from tokengrove.openenv.resources import open_resource

Score = Callable[[Any, list[dict[str, Any]]], Any]


class HarnessSessionFactory:
    """Implements `AgentSessionFactory` for an unmodified agent.

    `agent`: a function `agent(task, base_url, api_key, ...)`, the words of a command, or a `Harness`. `verify(task,
    messages)` scores an episode after the agent has ended: a number, None, or an object with `env_reward`. `options`:
    of the sessions on the interception server, such as `tool_parser`.
    """

    def __init__(
        self,
        server: InterceptionServer,
        agent: Harness | Callable[..., Any] | Sequence[str] | str,
        verify: Score = lambda task, messages: None,
        **options: Unpack[SessionOptions],
    ) -> None:
        self._server, self._harness, self._verify, self._options = server, harness_of(agent), verify, options

    def create(self, *, task: Any, rollout_id: str) -> HarnessSession:
        """Start the agent on `task`."""
        return HarnessSession(task, self._harness, self._server.open(rollout_id, **self._options), self._verify)


class EnvironmentSessionFactory:
    """Implements `AgentSessionFactory` for an environment that the ReAct harness plays and whose `verify` scores.

    `environments`: an openenv `ResourceSessionFactory`, or a function that creates a `Resource` for a task. A task's
    `seed`, if it has one, is passed on. `sampling`: further fields of each request of the harness. `options`: of the
    sessions on the interception server.
    """

    def __init__(
        self,
        server: InterceptionServer,
        environments: Any,
        *,
        max_turns: int = 10,
        sampling: Mapping[str, Any] | None = None,
        options: SessionOptions | None = None,
    ) -> None:
        """Raises InvalidRequest for a factory that is a class."""
        if isinstance(environments, type) and hasattr(environments, "create"):
            name = environments.__name__
            raise InvalidRequest(f"'environments' is the class {name}; pass an instance", param="environments")
        self._server, self._environments, self._options = server, environments, options or SessionOptions()
        self._max_turns, self._sampling = max_turns, sampling

    def create(self, *, task: Any, rollout_id: str) -> HarnessSession:
        """Create an environment for `task` and start the harness in it."""
        resource = open_resource(self._environments, task, rollout_id)
        try:
            harness = ReAct(resource, self._max_turns, self._sampling)

            def verify(task: Any, messages: list[dict[str, Any]]) -> Any:
                return resource.verify(harness.transcript.messages, harness.transcript.final_state())

            access = self._server.open(rollout_id, **self._options)
            return HarnessSession(task, FunctionHarness(harness), access, verify, resource.close)
        except BaseException:
            resource.close()
            raise
