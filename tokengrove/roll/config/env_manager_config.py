"""The settings of a train or validation manager: the number, types and groups of its environments."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.generating_arguments import GeneratingArguments
from tokengrove.roll.values import Section

ENVIRONMENT_WORKER = "roll.pipeline.agentic.environment_worker.EnvironmentWorker"
GROUP_FILTER = "roll.pipeline.agentic.agentic_pipeline.GroupFilter"


@dataclass
class LLMProxyConfig:
    """The model of the direct managers: the server's engine (`policy`), or the proxy that `proxy_type` names."""

    proxy_type: str = "policy"
    proxy_config: dict[str, Any] = field(default_factory=dict)


@dataclass
class EnvManagerConfig:
    """ROLL's fields and defaults. Group g has the environments g * final_group_size to (g + 1) * final_group_size - 1.

    `tags` name the environments in `custom_envs`; `num_groups_partition` is the number of groups of each tag, by
    default equal. `world_size` workers have up to `max_env_num_per_worker` environments each (0: one worker has all).
    `max_traj_per_env` is the number of episodes of an environment in a batch (-1: as many as the batch needs).
    `env_configs` {worker rank: {env_id: section}} is filled by AgenticConfig.

    Raises InvalidRequest with the name of the field.
    """

    name: str | None = None
    num_env_groups: int = 128
    group_size: int = 1
    group_size_redundancy: int = 0
    tags: list[str] = field(default_factory=lambda: ["SimpleSokoban"])
    num_groups_partition: list[int] = field(default_factory=list)
    max_env_num_per_worker: int = 0
    max_traj_per_env: int = -1
    format_penalty: float = 0.0
    worker_cls: str = ENVIRONMENT_WORKER
    group_filter_cls: str = GROUP_FILTER
    generating_args: GeneratingArguments | None = None
    llm_proxy: LLMProxyConfig = field(default_factory=LLMProxyConfig)
    system_envs: dict[str, str] = field(default_factory=dict)
    model_args: Section = field(init=False, default_factory=Section)
    world_size: int = field(init=False)
    env_configs: dict[int, dict[int, Section]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.check()

    @property
    def final_group_size(self) -> int:
        """The number of environments of a group, including redundant ones."""
        return self.group_size + self.group_size_redundancy

    @property
    def section(self) -> str:
        """Its section in the configuration, as a prefix of its fields: `train_env_manager.`."""
        return f"{self.name}_manager." if self.name else ""

    def check(self) -> None:
        """Check the numbers, and compute the derived ones."""
        at = self.section
        for name, least in (("num_env_groups", 0), ("group_size", 1), ("group_size_redundancy", 0)):
            if getattr(self, name) < least:
                raise InvalidRequest(
                    f"{at}{name} is {getattr(self, name)}; it must be at least {least}", param=f"{at}{name}"
                )
        self._divide_groups(at)
        total = self.num_env_groups * self.final_group_size
        if self.max_env_num_per_worker <= 0:
            self.max_env_num_per_worker = total
        self.world_size = -(-total // self.max_env_num_per_worker) if total else 0

    def _divide_groups(self, at: str) -> None:
        groups, tags, parts = self.num_env_groups, self.tags, self.num_groups_partition
        field_name = f"{at}num_groups_partition"
        if not parts and tags:
            if groups % len(tags):
                raise InvalidRequest(
                    f"{at}num_env_groups={groups} cannot be divided equally among {len(tags)} tags; "
                    f"give {field_name}, the number of groups of each tag",
                    param=field_name,
                )
            self.num_groups_partition = [groups // len(tags)] * len(tags)
            return
        if len(parts) != len(tags):
            raise InvalidRequest(
                f"{field_name} has {len(parts)} numbers for {len(tags)} {at}tags; it needs one for each tag, "
                "or may be left out for equal parts",
                param=field_name,
            )
        if sum(parts) != groups or min(parts, default=0) < 0:
            raise InvalidRequest(
                f"{field_name}={parts} has the sum {sum(parts)}, but {at}num_env_groups is {groups}; they must agree",
                param=field_name,
            )
