"""ROLL's configuration: its YAML, its fields and defaults, and our classes for its class names."""

from tokengrove.roll.config.agentic_config import (
    AgenticConfig,
    EnvMonitorConfig,
    RolloutMockConfig,
    compose,
    referred,
)
from tokengrove.roll.config.class_names import resolve
from tokengrove.roll.config.env_manager_config import EnvManagerConfig, LLMProxyConfig
from tokengrove.roll.config.generating_arguments import GeneratingArguments, sampling_of
from tokengrove.roll.config.roll_names import use_roll_names

__all__ = [
    "AgenticConfig",
    "EnvManagerConfig",
    "EnvMonitorConfig",
    "GeneratingArguments",
    "LLMProxyConfig",
    "RolloutMockConfig",
    "compose",
    "referred",
    "resolve",
    "sampling_of",
    "use_roll_names",
]
