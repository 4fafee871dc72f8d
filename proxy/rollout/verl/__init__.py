"""Agent loops as verl runs them, under the names that its users know."""

from proxy.rollout.verl.loop_base import AgentLoopBase
from proxy.rollout.verl.manager import AgentLoopManager
from proxy.rollout.verl.outputs import AgentLoopMetrics, AgentLoopOutput, TokenOutput
from proxy.rollout.verl.registry import register
from proxy.rollout.verl.sample_run import AgentLoopFailed
from proxy.rollout.verl.server_manager import AsyncLLMServerManager, PromptTooLong
from proxy.rollout.verl.server_tokenizer import ServerTokenizer
from proxy.rollout.verl.settings import DictConfigWrap, ToolListWrap
from proxy.rollout.verl.single_turn import SingleTurnAgentLoop
from proxy.rollout.verl.tracing import rollout_trace_attr, rollout_trace_op, simple_timer
from proxy.rollout.verl.worker import AgentLoopWorker, get_trajectory_info

__all__ = [
    "AgentLoopBase",
    "AgentLoopFailed",
    "AgentLoopManager",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AgentLoopWorker",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "PromptTooLong",
    "ServerTokenizer",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "ToolListWrap",
    "get_trajectory_info",
    "register",
    "rollout_trace_attr",
    "rollout_trace_op",
    "simple_timer",
]
