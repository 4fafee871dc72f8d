"""Environments of gem, played by ROLL's stock runners."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.kinds.roll_runner import RunnerAgent
from tokengrove.roll.runners import load_environment
from tokengrove.rollout.imports import load

_RUNNERS = {
    "GEMRunner": "tokengrove.roll.runners:GEMRunner",
    "ToolCallRunner": "tokengrove.roll.runners:ToolCallRunner",
}


def environment_agent(found: Any, arguments: Mapping[str, Any], name: str) -> RunnerAgent:
    """The agent that plays an environment, given by its name in gem or as a class.

    `arguments` are the `env_config` of the runner (`config`, `max_steps`, `agent_template`, `tool_wrapper`, ...), and
    `runner`: GEMRunner (the default; observations are text), ToolCallRunner (observations are messages), or the path of
    a class. Raises InvalidRequest for an environment that gem does not know, if gem is not installed, and for an
    instance.
    """
    env_config = dict(arguments)
    runner = str(env_config.pop("runner", "GEMRunner"))
    if not (isinstance(found, str | type)):
        raise InvalidRequest(f"{name} is an instance; name its class: each episode has an environment", param="agent")
    env_config["env_type"] = found if isinstance(found, str) else name
    load_environment(env_config["env_type"])
    return RunnerAgent(load(_RUNNERS.get(runner, runner)), env_config, name)
