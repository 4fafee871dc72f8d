"""A wrapper that answers the tool calls in an agent's texts. Other texts go to the environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.runners.tools.registration import make_tool

_NO_MORE = "\n\nNo further tool call is possible: give the final answer now."


class ToolEnvWrapper:
    """An environment of texts whose agent may call tools. All other attributes are the environment's own.

    `reset` raises InvalidRequest if the observations of the environment are not texts.

    A tool has `instruction_string()`, which is appended to the first observation, `tool_type`, and
    `execute_action(action) -> (found, failed, observation, parsed_action)`: whether the text has a call of the tool,
    whether the call failed, its result, and the text up to the end of the call. The first tool whose call succeeds
    answers, else the first that found a call. After `max_tool_uses` calls (None: no limit) in an episode, all texts go
    to the environment.

    A call earns `tool_reward`, and also `tool_success_reward` if it succeeds. `info["metrics"]` counts calls and
    successes; `info["use_tool"]`: whether the observation is a tool's.
    """

    def __init__(
        self,
        env: Any,
        tools: Sequence[Any],
        tool_reward: float = 0.0,
        tool_success_reward: float = 0.0,
        max_tool_uses: int | None = 10,
    ) -> None:
        self.env, self.tools = env, list(tools)
        self.tool_reward, self.tool_success_reward = tool_reward, tool_success_reward
        self.max_tool_uses = float("inf") if max_tool_uses is None else max_tool_uses
        self.tool_use_counter = self.tool_success_counter = 0

    def __getattr__(self, name: str) -> Any:
        if name == "env":  # a copy in the making does not have it yet
            raise AttributeError(name)
        return getattr(self.env, name)

    @property
    def unwrapped(self) -> Any:
        return getattr(self.env, "unwrapped", self.env)

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        """Begin an episode. The observation is None if the environment has no data left."""
        self.tool_use_counter = self.tool_success_counter = 0
        observation, info = self.env.reset(seed=seed)
        if observation is None:
            return None, {}
        if not isinstance(observation, str):
            raise InvalidRequest("tool_wrapper needs an environment whose observations are texts; this one's are not")
        instructions = "\n".join(tool.instruction_string() for tool in self.tools)
        if len(self.tools) > 1:
            instructions = f"Available tools:\n{instructions}"
        return f"{observation}\n{instructions}", self._told(info, use_tool=False)

    def step(self, action: str, verbose: bool = False) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        """Answer a call, or take a step of the environment. `verbose` prints the calls."""
        answer = self._answer(action) if self.tool_use_counter < self.max_tool_uses else None
        if answer is None:
            observation, reward, terminated, truncated, info = self.env.step(action)
            return observation, reward, terminated, truncated, self._told(info, use_tool=False)
        tool, failed, observation, parsed = answer
        self.tool_use_counter += 1
        self.tool_success_counter += not failed
        if verbose:
            print(f"call {self.tool_use_counter} of a tool, {tool.tool_type}: {'failed' if failed else 'succeeded'}")
        if self.tool_use_counter >= self.max_tool_uses:
            observation += _NO_MORE
        reward = self.tool_reward + (0.0 if failed else self.tool_success_reward)
        info = {"parsed_action": parsed, "tool_type": tool.tool_type}
        return observation, reward, False, False, self._told(info, use_tool=True)

    def get_state(self) -> dict[str, Any]:
        """The environment's state and the counts."""
        counts = {"tool_use_counter": self.tool_use_counter, "tool_success_counter": self.tool_success_counter}
        return {**self.env.get_state(), **counts}

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `get_state`."""
        self.env.set_state(state)
        self.tool_use_counter = state.get("tool_use_counter", 0)
        self.tool_success_counter = state.get("tool_success_counter", 0)

    def close(self) -> None:
        """Close the tools and the environment, if they have `close`."""
        for each in (*self.tools, self.env):
            if callable(closing := getattr(each, "close", None)):
                closing()

    def _answer(self, action: str) -> tuple[Any, bool, str, str] | None:
        """The tool that answers, whether its call failed, the observation and the call; None without a call."""
        first = None
        for tool in self.tools:
            found, failed, observation, parsed = tool.execute_action(action)
            if found and not failed:
                return tool, False, observation, parsed
            if found and first is None:
                first = tool, True, observation, parsed
        return first

    def _told(self, info: Mapping[str, Any] | None, *, use_tool: bool) -> dict[str, Any]:
        info = dict(info or {})
        counts = {"tool_use_counter": self.tool_use_counter, "tool_success_counter": self.tool_success_counter}
        modes = dict.fromkeys(counts, "last")
        return {
            **info,
            "metrics": {**counts, **(info.get("metrics") or {})},
            "metrics_agg_mode": {**modes, **(info.get("metrics_agg_mode") or {})},
            "use_tool": use_tool,
        }


def tool_wrapper(
    env: Any, wrapper_args: Mapping[str, Any] | None = None, tool_configs: Iterable[Mapping[str, Any]] | None = None
) -> ToolEnvWrapper:
    """Wrap `env` with the tools in `tool_configs`, each `{"tool_id": ..., "tool_args": {...}}`.

    `wrapper_args` are those of ToolEnvWrapper. Raises InvalidRequest for an unknown tool.
    """
    tools = [make_tool(each["tool_id"], **(each.get("tool_args") or {})) for each in tool_configs or ()]
    return ToolEnvWrapper(env, tools, **(wrapper_args or {}))
