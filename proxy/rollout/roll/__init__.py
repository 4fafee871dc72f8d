"""Agents, environments and managers as ROLL runs them, under the names that its users know."""

from proxy.rollout.roll.config import (
    AgenticConfig,
    EnvManagerConfig,
    EnvMonitorConfig,
    GeneratingArguments,
    LLMProxyConfig,
    RolloutMockConfig,
    compose,
    resolve,
    sampling_of,
    use_roll_names,
)
from proxy.rollout.roll.managers import BaseEnvManager, EpisodeSession, ProxyEnvManager
from proxy.rollout.roll.rock import PushModeRunner, RockAgentRunner
from proxy.rollout.roll.runners import (
    AgentRunner,
    GEMRunner,
    PythonCodeTool,
    ToolCallRunner,
    ToolEnvWrapper,
    make_tool,
    print_tools,
    register_tools,
    tool_wrapper,
)
from proxy.rollout.roll.scheduler import EnvActivityMonitor, GroupData, GroupFilter, GroupQueue, GroupQueueManager
from proxy.rollout.roll.values import DataProto, EpisodeResult, Section

__all__ = [
    "AgentRunner",
    "AgenticConfig",
    "BaseEnvManager",
    "DataProto",
    "EnvActivityMonitor",
    "EnvManagerConfig",
    "EnvMonitorConfig",
    "EpisodeResult",
    "EpisodeSession",
    "GEMRunner",
    "GeneratingArguments",
    "GroupData",
    "GroupFilter",
    "GroupQueue",
    "GroupQueueManager",
    "LLMProxyConfig",
    "ProxyEnvManager",
    "PushModeRunner",
    "PythonCodeTool",
    "RockAgentRunner",
    "RolloutMockConfig",
    "Section",
    "ToolCallRunner",
    "ToolEnvWrapper",
    "compose",
    "make_tool",
    "print_tools",
    "register_tools",
    "resolve",
    "sampling_of",
    "tool_wrapper",
    "use_roll_names",
]
