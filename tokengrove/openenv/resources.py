"""OpenEnv's environments in the interface of a harness: initial messages, tools, a score, an end."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from tokengrove.client.libraries import library
from tokengrove.errors import InvalidRequest
from tokengrove.openenv.react import Resource
from tokengrove.rollout.episodes.task_fields import first_messages, without_messages


def is_resource_factory(found: Any) -> bool:
    """Whether `found`, a class or an object, creates openenv's resource sessions: `create(task, seed, episode_id)`."""
    return {"task", "episode_id"} <= _parameters(getattr(found, "create", None))


def is_session_factory(found: Any) -> bool:
    """Whether `found`, a class or an object, is a factory of the contract: `create(*, task, rollout_id)`."""
    return {"task", "rollout_id"} <= _parameters(getattr(found, "create", None))


def _parameters(function: Any) -> set[str]:
    try:
        return set(inspect.signature(function).parameters) if callable(function) else set()
    except (TypeError, ValueError):
        return set()


def open_resource(environments: Any, task: Any, episode_id: str) -> Resource:
    """Create the environment of a task, with the task's `seed` if it has one."""
    if not hasattr(environments, "create"):
        made: Resource = environments(task)
        return made
    seed = task.get("seed") if isinstance(task, Mapping) else None
    taken = _parameters(environments.create)
    more = {name: value for name, value in (("seed", seed), ("episode_id", episode_id)) if name in taken}
    made = environments.create(task, **more)
    return made


def messages_of(task: Any) -> list[dict[str, Any]]:
    """The first messages of a task: of a row of data, a list of messages, or a text."""
    if isinstance(task, Mapping):
        if (found := first_messages(task)) is None:
            raise InvalidRequest(f"the task {without_messages(task)}", param="task")
        return found
    if isinstance(task, str):
        return [{"role": "user", "content": task}]
    return [dict(message) for message in task]


class ToolEnvironment:
    """Implements `Resource` for an environment whose tools are MCP tools, with openenv's `MCPToolClient`.

    Each call is a step, with its reward and its end of the episode. `env_reward` is the reward of the last step that
    has one, or the result of `score(messages, final_state)`.
    """

    def __init__(
        self,
        client: Any,
        task: Any,
        *,
        score: Callable[[list[dict[str, Any]], Any], float | None] | None = None,
        seed: int | None = None,
        episode_id: str | None = None,
    ) -> None:
        """Reset the environment. `client`: an `MCPToolClient`, of which the blocking interface is used; it is closed
        with this object, or if the reset fails.
        """
        self._client = client.sync() if callable(getattr(client, "sync", None)) else client
        self._task, self._score = task, score
        self._reward: float | None = None
        self._done = False
        asked = {name: value for name, value in (("seed", seed), ("episode_id", episode_id)) if value is not None}
        try:
            self._client.reset(**asked)
        except BaseException:
            self.close()
            raise

    def initial_messages(self) -> list[dict[str, Any]]:
        return messages_of(self._task)

    def list_tools(self) -> list[Any]:
        return list(self._client.list_tools())

    def call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        """Call a tool as a step. Raises ValueError with the environment's reason if it rejects the call."""
        action, told = library("openenv.core.env_server.mcp_types").CallToolAction, library("openenv.core.harness")
        result = self._client.step(action(tool_name=name, arguments=arguments))
        if result.reward is not None:
            self._reward = float(result.reward)
        self._done = self._done or bool(result.done)
        error = getattr(result.observation, "error", None)
        if error is not None:
            raise ValueError(getattr(error, "message", str(error)))
        data = _of_tool(getattr(result.observation, "result", None))
        return told.ToolResult(data=data, done=bool(result.done), metadata={"reward": result.reward})

    def verify(self, transcript: list[dict[str, Any]], final_state: Any | None = None) -> Any:
        reward = self._reward if self._score is None else self._score(transcript, final_state)
        return library("openenv.core.harness").VerifyResult(env_reward=reward, done=self._done)

    def close(self) -> None:
        self._client.close()


def _of_tool(result: Any) -> Any:
    """The result of a tool without MCP's wrapper: its data, or the text of its content."""
    for name in ("data", "structured_content"):
        found = result.get(name) if isinstance(result, Mapping) else getattr(result, name, None)
        if found is not None:
            return found
    content = result.get("content") if isinstance(result, Mapping) else getattr(result, "content", None)
    if isinstance(content, list):
        texts = [part.get("text", "") if isinstance(part, Mapping) else getattr(part, "text", "") for part in content]
        return "\n".join(texts)
    return result
