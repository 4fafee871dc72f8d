"""ROLL's configuration: its YAML, its fields and defaults, and what its class names mean here."""

from proxy.rollout.roll.config.agentic_config import AgenticConfig, EnvMonitorConfig, RolloutMockConfig, compose
from proxy.rollout.roll.config.env_manager_config import EnvManagerConfig, LLMProxyConfig
from proxy.rollout.roll.config.generating_arguments import GeneratingArguments, sampling_of

__all__ = [
    "AgenticConfig",
    "EnvManagerConfig",
    "EnvMonitorConfig",
    "GeneratingArguments",
    "LLMProxyConfig",
    "RolloutMockConfig",
    "compose",
    "sampling_of",
]
