"""Agents, environments and managers as ROLL runs them, under the names that its users know."""

from proxy.rollout.roll.managers import BaseEnvManager, EpisodeSession
from proxy.rollout.roll.rock import PushModeRunner, RockAgentRunner
from proxy.rollout.roll.runners import AgentRunner
from proxy.rollout.roll.scheduler import EnvActivityMonitor, GroupData, GroupFilter, GroupQueue, GroupQueueManager
from proxy.rollout.roll.values import DataProto, EpisodeResult, Section

__all__ = [
    "AgentRunner",
    "BaseEnvManager",
    "DataProto",
    "EnvActivityMonitor",
    "EpisodeResult",
    "EpisodeSession",
    "GroupData",
    "GroupFilter",
    "GroupQueue",
    "GroupQueueManager",
    "PushModeRunner",
    "RockAgentRunner",
    "Section",
]
