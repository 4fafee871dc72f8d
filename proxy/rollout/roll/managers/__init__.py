"""Managers, which play the episodes of one environment each and lay out what was sampled."""

from proxy.rollout.roll.managers.base_env_manager import BaseEnvManager
from proxy.rollout.roll.managers.episode_session import EpisodeSession
from proxy.rollout.roll.managers.proxy_env_manager import ProxyEnvManager
from proxy.rollout.roll.managers.rollouts import rollout_of

__all__ = ["BaseEnvManager", "EpisodeSession", "ProxyEnvManager", "rollout_of"]
