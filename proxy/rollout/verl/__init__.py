"""Agent loops as verl runs them, under the names that its users know."""

from proxy.rollout.verl.loop_base import AgentLoopBase
from proxy.rollout.verl.outputs import AgentLoopMetrics, AgentLoopOutput, TokenOutput
from proxy.rollout.verl.registry import register
from proxy.rollout.verl.server_manager import AsyncLLMServerManager, PromptTooLong
from proxy.rollout.verl.server_tokenizer import ServerTokenizer
from proxy.rollout.verl.settings import DictConfigWrap
from proxy.rollout.verl.single_turn import SingleTurnAgentLoop
from proxy.rollout.verl.tracing import rollout_trace_attr, rollout_trace_op, simple_timer

__all__ = [
    "AgentLoopBase",
    "AgentLoopMetrics",
    "AgentLoopOutput",
    "AsyncLLMServerManager",
    "DictConfigWrap",
    "PromptTooLong",
    "ServerTokenizer",
    "SingleTurnAgentLoop",
    "TokenOutput",
    "register",
    "rollout_trace_attr",
    "rollout_trace_op",
    "simple_timer",
]
