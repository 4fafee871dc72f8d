"""OpenEnv's contract on this server: the trainer's `generate`, intercepted harnesses, and a worker that joins them."""

from tokengrove.openenv.completion_text import CompletionText
from tokengrove.openenv.factory_agents import ResourceFactoryAgent, SessionFactoryAgent
from tokengrove.openenv.harness import CommandHarness, FunctionHarness, Harness
from tokengrove.openenv.harness_session import HarnessSession
from tokengrove.openenv.interception import Interception
from tokengrove.openenv.interception_server import InterceptionServer
from tokengrove.openenv.model_step import SessionModelStep
from tokengrove.openenv.react import ReAct
from tokengrove.openenv.resources import ToolEnvironment, is_resource_factory, is_session_factory
from tokengrove.openenv.rollout_clock import RolloutTimeout
from tokengrove.openenv.server_generate import ServerGenerate
from tokengrove.openenv.session_factories import EnvironmentSessionFactory, HarnessSessionFactory
from tokengrove.openenv.turn_tokens import TurnTokens
from tokengrove.openenv.verified import Verified
from tokengrove.openenv.worker import HarnessRolloutWorker, RolloutFailure

__all__ = [
    "CommandHarness",
    "CompletionText",
    "EnvironmentSessionFactory",
    "FunctionHarness",
    "Harness",
    "HarnessRolloutWorker",
    "HarnessSession",
    "HarnessSessionFactory",
    "Interception",
    "InterceptionServer",
    "ReAct",
    "ResourceFactoryAgent",
    "RolloutFailure",
    "RolloutTimeout",
    "ServerGenerate",
    "SessionFactoryAgent",
    "SessionModelStep",
    "ToolEnvironment",
    "TurnTokens",
    "Verified",
    "is_resource_factory",
    "is_session_factory",
]
