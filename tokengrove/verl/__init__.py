"""Agent loops of verl, with verl's names.

`_agent_loop_registry` and `_DummyConfig` are names that the worker in verl's documentation uses.
"""

from tokengrove.rollout.server_tokenizer import ServerTokenizer
from tokengrove.verl.agent_data import AgentData, AgentState
from tokengrove.verl.loop_base import AgentLoopBase
from tokengrove.verl.manager import AgentLoopManager
from tokengrove.verl.outputs import AgentLoopMetrics, AgentLoopOutput, TokenOutput
from tokengrove.verl.registry import _agent_loop_registry, register
from tokengrove.verl.sample_run import AgentLoopFailed
from tokengrove.verl.server_manager import AsyncLLMServerManager, PromptTooLong
from tokengrove.verl.settings import DictConfigWrap, ToolListWrap
from tokengrove.verl.settings import DictConfigWrap as _DummyConfig
from tokengrove.verl.single_turn import SingleTurnAgentLoop
from tokengrove.verl.tool_agent_loop import ToolAgentLoop
from tokengrove.verl.tool_parsers import FunctionCall, ToolParser
from tokengrove.verl.tools import (
    BaseTool,
    FunctionTool,
    OpenAIFunctionToolSchema,
    ToolResponse,
    function_tool,
    initialize_tools_from_config,
    load_all_tools,
)
from tokengrove.verl.tracing import rollout_trace_attr, rollout_trace_op, simple_timer
from tokengrove.verl.worker import AgentLoopWorker, get_trajectory_info

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
