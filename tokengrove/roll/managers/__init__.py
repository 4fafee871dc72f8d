"""Managers. Each plays the episodes of one environment and returns the samples."""

from tokengrove.roll.managers.agent_native_env_manager import AgentNativeStepEnvManager
from tokengrove.roll.managers.base_env_manager import BaseEnvManager
from tokengrove.roll.managers.episode_session import EpisodeSession
from tokengrove.roll.managers.llm_proxies import BaseLLMProxy, register_llm_proxy
from tokengrove.roll.managers.proxy_env_manager import ProxyEnvManager
from tokengrove.roll.managers.rollout_cache import RolloutCache
from tokengrove.roll.managers.rollouts import rollout_of
from tokengrove.roll.managers.step_concat_env_manager import StepConcatEnvManager
from tokengrove.roll.managers.step_env_manager import StepEnvManager
from tokengrove.roll.managers.token_mask_utils import (
    compute_conversation_end_token_id,
    custom_apply_chat_template,
)
from tokengrove.roll.managers.traj_env_manager import TrajEnvManager
from tokengrove.roll.managers.vl_traj_env_manager import VLTrajEnvManager

__all__ = [
    "AgentNativeStepEnvManager",
    "BaseEnvManager",
    "BaseLLMProxy",
    "EpisodeSession",
    "ProxyEnvManager",
    "RolloutCache",
    "StepConcatEnvManager",
    "StepEnvManager",
    "TrajEnvManager",
    "VLTrajEnvManager",
    "compute_conversation_end_token_id",
    "custom_apply_chat_template",
    "register_llm_proxy",
    "rollout_of",
]
