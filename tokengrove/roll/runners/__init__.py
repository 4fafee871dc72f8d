"""Agents in ROLL's form: a runner plays one episode for each seed, and calls the model through its session.

This package imports gem and other environments only when a runner creates one.
"""

from tokengrove.roll.runners.agent_runner import AgentRunner, EpisodeTimeout
from tokengrove.roll.runners.environments import load_environment, make_environment
from tokengrove.roll.runners.gem_runner import GEMRunner, ToolCallRunner
from tokengrove.roll.runners.played import played
from tokengrove.roll.runners.request_error import RequestError
from tokengrove.roll.runners.tools import (
    MCPTool,
    PythonCodeTool,
    ToolEnvWrapper,
    make_tool,
    print_tools,
    register_tools,
    tool_wrapper,
)

__all__ = [
    "AgentRunner",
    "EpisodeTimeout",
    "GEMRunner",
    "MCPTool",
    "PythonCodeTool",
    "RequestError",
    "ToolCallRunner",
    "ToolEnvWrapper",
    "load_environment",
    "make_environment",
    "make_tool",
    "played",
    "print_tools",
    "register_tools",
    "tool_wrapper",
]
