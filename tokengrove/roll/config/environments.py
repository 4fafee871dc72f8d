"""The configurations of single environments, made of the custom environments and the numbers of a manager."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.env_manager_config import EnvManagerConfig
from tokengrove.roll.config.fields import as_mapping, check_near, nearest
from tokengrove.roll.values import Section

TRAJ_ENV_MANAGER = "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
_KNOWN = (
    *("env_type", "max_steps", "max_tokens_per_step", "env_manager_cls", "agent_runner_cls", "use_thread_lock"),
    *("agent_system_template", "agent_template", "tool_wrapper", "history_length", "max_env_step_concurrent"),
    *("pre_step_template", "next_step_template", "env_config"),
    *("http_timeout", "episode_timeout", "task_timeout_sec"),
)
_OF_MANAGERS = (
    *("trajectory_mode", "reward_granularity", "tool_call_parser", "enable_thinking", "enable_fork"),
    *("http_timeout", "episode_timeout", "task_timeout_sec", "max_tokens_per_step", "infer_callback_url"),
    *("dataset_name", "job_config_path", "job_config", "sandbox_cls", "max_iterations", "num_retries", "model_name"),
    *("scaffold_config", "model_service_cls", "model_service_port", "max_new_tokens"),
)
"""Names in an `env_config` that managers and runners read, in addition to those of its environment."""
_NEAR = 0.85
"""The similarity, from 0 to 1, at which a name counts as a misspelling of these, and not as the environment's."""
_MOST = 2**31 - 1


def env_configs_of(
    manager: EnvManagerConfig, custom_envs: Mapping[str, Any], seed: int | None
) -> dict[int, dict[int, Section]]:
    """{worker rank: {env_id: section}}: the keys of the custom environment of the environment's tag, and `tag`,
    `group_id`, `env_id`, `env_class` (its env_type), `config` (its env_config), `env_manager_cls` and `group_seed`.

    The environments of a group share a `group_seed`, 0 to 2**31 - 1. With a `seed` the group seeds are derived from it
    and the manager's name, so that validation is the same in every run; without one they are random, as in ROLL. Raises
    InvalidRequest for a tag without a custom environment, and for a custom environment without an env_type.
    """
    draw = random.Random(None if seed is None else f"{seed}:{manager.name}")
    configs: dict[int, dict[int, Section]] = {}
    tags = [tag for tag, groups in zip(manager.tags, manager.num_groups_partition, strict=True) for _ in range(groups)]
    for group_id, tag in enumerate(tags):
        template = _template(tag, custom_envs, manager)
        group_seed = draw.randint(0, _MOST)
        first = group_id * manager.final_group_size
        for env_id in range(first, first + manager.final_group_size):
            entry = Section({name: value for name, value in template.items() if name != "env_config"})
            entry.update(
                tag=tag,
                group_id=group_id,
                env_id=env_id,
                config=Section(as_mapping(template.get("env_config"), f"custom_envs.{tag}.env_config")),
                env_class=template["env_type"],
                env_manager_cls=template.get("env_manager_cls") or TRAJ_ENV_MANAGER,
                group_seed=group_seed,
            )
            configs.setdefault(env_id // manager.max_env_num_per_worker, {})[env_id] = entry
    return configs


def _template(tag: str, custom_envs: Mapping[str, Any], manager: EnvManagerConfig) -> Mapping[str, Any]:
    path = f"custom_envs.{tag}"
    found = custom_envs.get(tag)
    if tag not in custom_envs:
        raise InvalidRequest(
            f"{manager.section}tags has {tag!r}, which custom_envs lacks{nearest(tag, custom_envs)}", param=path
        )
    if not isinstance(found, Mapping):
        raise InvalidRequest(f"{path} must be a mapping, not {found!r}", param=path)
    check_near(found, _KNOWN, path)
    if isinstance(env_config := found.get("env_config"), Mapping):
        check_near(env_config, _OF_MANAGERS, f"{path}.env_config", cutoff=_NEAR)
    if "env_type" not in found:
        raise InvalidRequest(f"{path} has no env_type; set it to the environment's id in gem", param=f"{path}.env_type")
    return found
