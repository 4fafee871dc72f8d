"""Agent loops as verl runs them, under the names that its users know.

`_agent_loop_registry` and `_DummyConfig` are names that the worker in verl's documentation uses.
"""

from proxy.rollout.server_tokenizer import ServerTokenizer
from proxy.rollout.verl.agent_data import AgentData, AgentState
from proxy.rollout.verl.loop_base import AgentLoopBase
from proxy.rollout.verl.manager import AgentLoopManager
from proxy.rollout.verl.outputs import AgentLoopMetrics, AgentLoopOutput, TokenOutput
from proxy.rollout.verl.registry import _agent_loop_registry, register
from proxy.rollout.verl.sample_run import AgentLoopFailed
from proxy.rollout.verl.server_manager import AsyncLLMServerManager, PromptTooLong
from proxy.rollout.verl.settings import DictConfigWrap, ToolListWrap
from proxy.rollout.verl.settings import DictConfigWrap as _DummyConfig
from proxy.rollout.verl.single_turn import SingleTurnAgentLoop
from proxy.rollout.verl.tool_agent_loop import ToolAgentLoop
from proxy.rollout.verl.tool_parsers import FunctionCall, ToolParser
from proxy.rollout.verl.tools import (
    BaseTool,
    FunctionTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_tool,
    initialize_tools_from_config,
    load_all_tools,
)
from proxy.rollout.verl.tracing import rollout_trace_attr, rollout_trace_op, simple_timer
from proxy.rollout.verl.worker import AgentLoopWorker, get_trajectory_info

__all__ = [
    "AgentData",
    "AgentLoopBase",
    "AgentLoopFailed",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AgentState",
    "AsyncLLMServerManager",
    "BaseTool",
    "DictConfigWrap",
    "FunctionCall",
    "FunctionTool",
    "OpenAIFunctionToolSchema",
    "PromptTooLong",
    "ServerTokenizer",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "ToolAgentLoop",
    "ToolListWrap",
    "ToolParser",
    "ToolResponse",
    "_DummyConfig",
    "_agent_loop_registry",
    "function_tool",
    "get_trajectory_info",
    "initialize_tools_from_config",
    "load_all_tools",
    "register",
    "rollout_trace_attr",
    "rollout_trace_op",
    "simple_timer",
]
