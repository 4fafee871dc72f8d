"""Agents in ROLL's shape: a runner plays one episode for each seed, and asks the model through its session.

This package imports neither gem nor any other environment until a runner makes one.
"""

from proxy.rollout.roll.runners.agent_runner import AgentRunner, EpisodeTimeout
from proxy.rollout.roll.runners.played import played
from proxy.rollout.roll.runners.request_error import RequestError

__all__ = ["AgentRunner", "EpisodeTimeout", "RequestError", "played"]
