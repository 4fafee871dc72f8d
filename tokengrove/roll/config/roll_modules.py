"""ROLL's modules and our objects for their names. A name is looked up on access, and not imported before."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

_AGENTIC = "roll.pipeline.agentic"
_RUNNERS, _MANAGERS, _ENVS, _TOOLS = (f"{_AGENTIC}.{name}" for name in ("agent_runner", "env_manager", "env", "tools"))
_OURS = "tokengrove.roll"
_PROXIES = "managers.llm_proxies"

MODULES: Mapping[str, Mapping[str, str]] = {
    f"{_RUNNERS}": {"AgentRunner": "runners", "EpisodeResult": "values"},
    f"{_RUNNERS}.base": {"AgentRunner": "runners", "EpisodeResult": "values"},
    f"{_RUNNERS}.gem_runner": dict.fromkeys(("GEMRunner", "ToolCallRunner"), "runners"),
    f"{_RUNNERS}.rock": dict.fromkeys(("RockAgentRunner", "PushModeRunner", "PullModeRunner"), "rock"),
    f"{_RUNNERS}.rock.rock_agent_runner": {"RockAgentRunner": "rock"},
    f"{_RUNNERS}.rock.push_runner": {"PushModeRunner": "rock"},
    f"{_RUNNERS}.rock.pull_runner": {"PullModeRunner": "rock"},
    f"{_MANAGERS}.base_env_manager": dict.fromkeys(("BaseEnvManager", "RolloutCache"), "managers"),
    f"{_MANAGERS}.proxy_env_manager": {"ProxyEnvManager": "managers"},
    f"{_MANAGERS}.traj_env_manager": {"TrajEnvManager": "managers"},
    f"{_MANAGERS}.step_env_manager": {"StepEnvManager": "managers"},
    f"{_MANAGERS}.step_concat_env_manager": {"StepConcatEnvManager": "managers"},
    f"{_MANAGERS}.agent_native_env_manager": {
        "AgentNativeStepEnvManager": "managers",
        "GroupFilter": "scheduler.agent_native_filter",
    },
    f"{_MANAGERS}.vl_traj_env_manager": {"VLTrajEnvManager": "managers"},
    f"{_MANAGERS}.token_mask_utils": dict.fromkeys(
        ("custom_apply_chat_template", "compute_conversation_end_token_id"), "managers"
    ),
    f"{_TOOLS}": {"register_tools": "runners"},
    f"{_TOOLS}.registration": dict.fromkeys(("register_tools", "make_tool", "print_tools"), "runners"),
    f"{_TOOLS}.tool_env_wrapper": dict.fromkeys(("ToolEnvWrapper", "tool_wrapper"), "runners"),
    f"{_TOOLS}.python_code_tool": {"PythonCodeTool": "runners"},
    f"{_TOOLS}.mcp_tool": {"MCPTool": "runners"},
    f"{_ENVS}": {"gem": "envs"},
    f"{_ENVS}.sokoban": {"SokobanEnv": "envs"},
    f"{_ENVS}.sokoban.env": {"SokobanEnv": "envs"},
    f"{_ENVS}.sokoban.native_env": {"SokobanNativeEnv": "envs"},
    f"{_ENVS}.sokoban.tool_call_env": {"SokobanToolCallEnv": "envs"},
    f"{_ENVS}.frozen_lake": {"FrozenLakeEnv": "envs"},
    f"{_ENVS}.frozen_lake.env": {"FrozenLakeEnv": "envs"},
    f"{_AGENTIC}.agentic_config": dict.fromkeys(
        ("AgenticConfig", "EnvManagerConfig", "EnvMonitorConfig", "LLMProxyConfig"), "config"
    ),
    f"{_AGENTIC}.agentic_pipeline": dict.fromkeys(("GroupFilter", "get_episode_scores"), "scheduler"),
    f"{_AGENTIC}.agentic_rollout_pipeline": {"AgenticRolloutPipeline": "scheduler"},
    f"{_AGENTIC}.environment_worker": {"EnvironmentWorker": "scheduler"},
    f"{_AGENTIC}.llm_proxy": dict.fromkeys(("BaseLLMProxy", "create_llm_proxy", "register_llm_proxy"), _PROXIES),
    f"{_AGENTIC}.llm_proxy.base_llm_proxy": dict.fromkeys(("BaseLLMProxy", "register_llm_proxy"), _PROXIES),
    f"{_AGENTIC}.llm_proxy.policy_proxy": {"PolicyProxy": _PROXIES},
    f"{_AGENTIC}.llm_proxy.random_proxy": {"RandomProxy": _PROXIES},
    f"{_AGENTIC}.utils": {"dump_rollout_trajectories": "scheduler"},
    "roll.configs": {"GeneratingArguments": "config"},
    "roll.configs.generating_args": {"GeneratingArguments": "config"},
    "roll.configs.base_config": {"RolloutMockConfig": "config"},
    "roll.datasets.global_dataset": {"GlobalDataset": "rock"},
    "roll.distributed.scheduler.protocol": {"DataProto": "values"},
    "roll.distributed.scheduler.rollout_scheduler": dict.fromkeys(
        ("RolloutScheduler", "GroupQueueManager", "GroupQueue", "GroupData", "EnvActivityMonitor"), "scheduler"
    ),
    "roll.utils.constants": dict.fromkeys(("GenerateStopReason", "EpisodeStopReason"), "values"),
    "roll.distributed.scheduler.router": {"RouterManager": "tokengrove.client:Client"},  # managers generate with it
    "roll.utils.functionals": {
        **dict.fromkeys(("aggregate_metrics", "pad_to_length"), "values"),
        **dict.fromkeys(("append_to_dict", "reduce_metrics"), "scheduler"),
    },
    "roll.utils.import_utils": {"safe_import_class": f"{_OURS}.config:resolve"},
    "roll.utils.logging": {"get_logger": "logging:getLogger"},
    "roll.utils.hash_utils": {"compute_object_hash": "values"},
    "roll.utils.str_utils": {"contains_renderable_field": "values"},
}
"""ROLL's modules: their names that we have, each with its package below tokengrove.roll, or with its full path."""

_ABSENT: Mapping[str, str] = {
    f"{_AGENTIC}.agentic_pipeline.AgenticPipeline": "it trains; AgenticRolloutPipeline plays, and your trainer trains",
    f"{_AGENTIC}.agentic_actor_worker": "it trains",
    f"{_AGENTIC}.agentic_actor_pg_worker": "it trains",
    f"{_AGENTIC}.proxy": "the server is the proxy: tokengrove serve, or Client(app=...) in this process",
    f"{_AGENTIC}.llm_proxy.openai_proxy": "the server's engine answers; choose it when you start the server",
    f"{_RUNNERS}.rock.pull_runner.ModelServiceOperator": "PullModeRunner.model_service_cls replaces it",
    f"{_RUNNERS}.rock.pull_runner.ModelServiceHarborTrial": "PullModeRunner.model_service_cls replaces it",
    "roll.datasets.global_dataset.GlobalDatasetManager": "tokengrove.roll.rock.reset_datasets replaces it",
    f"{_MANAGERS}.message_tracker": "the server tracks messages: a session is a tree of sampled tokens",
    "roll.distributed.scheduler.initialize": "there is no Ray to initialize; remove the call",
    f"{_ENVS}": "only sokoban, frozen_lake and sokoban_tool_call are here; register yours with gem.register",
}
"""Names that are not here, with the reason; a module stands for all names in it."""


def ours(path: str) -> Any:
    """Our object for a name of ROLL; None if there is none. Raises the exceptions of its module's import."""
    module, _, name = path.rpartition(".")
    place = MODULES.get(module, {}).get(name)
    if place is None:
        return None
    at, _, other = place.rpartition(":")
    return getattr(importlib.import_module(at or f"{_OURS}.{place}"), other if at else name, None)


def why_absent(path: str) -> str:
    """A sentence about a name of ROLL that is not here."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if reason := _ABSENT.get(".".join(parts[:end])):
            return f"{path} is not here: {reason}"
    module = path.rpartition(".")[0]
    have = MODULES.get(module)
    return f"{path} is not here" + (f"; of {module} there are {', '.join(have)}" if have else "")
