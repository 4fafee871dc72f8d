"""The meaning of the keys of ROLL's agentic pipelines in a run: one batch of episodes, without training.

A file may have ROLL's environments, which then play, or only ROLL's numbers together with an agent of the run.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from tokengrove.roll.config import AgenticConfig, EnvManagerConfig, GeneratingArguments, referred, sampling_of
from tokengrove.roll.config.agentic_config import check_setting_names
from tokengrove.roll.config.env_manager_config import GROUP_FILTER
from tokengrove.roll.config.fields import check_names, made
from tokengrove.roll.config.training_settings import DEFAULTS, OF_WORKERS, ROLES
from tokengrove.roll.episodes import tasks_of
from tokengrove.rollout.config import Config
from tokengrove.rollout.episodes import Task

logger = logging.getLogger(__name__)
AGENT = "tokengrove.roll.episodes:EnvironmentAgent"
_NAMES = {*(spec.name for spec in fields(AgenticConfig)), *DEFAULTS, *ROLES, "custom_env"}
SEED = "seed"
"""The key that ROLL's files and those of runs have in common."""
_SEED = 42
"""ROLL's seed. In ROLL, a configuration without a seed has random groups; a resumed run needs the same groups."""
_UNUSED = {
    "max_steps": "a run plays one batch, of rollout_batch_size or val_batch_size episodes",
    "eval_steps": "tokengrove eval plays the validation's environments",
    "async_generation_ratio": "nothing is played ahead",
    "rollout_dump_dir": "give output",
    "rollout_mock": "episodes are always played",
    "env_monitor": "give timeout_s",
}
"""Fields of AgenticConfig that have no effect here, and what to use instead."""
_MANAGERS = ("train_env_manager", "val_env_manager")
_said: set[str] = set()


def is_of_roll(name: str) -> bool:
    """Whether a top-level key of a file is one of ROLL's."""
    return name in _NAMES


def is_section_of_roll(name: str, value: Any) -> bool:
    """Whether a key that runs also have is a section of ROLL's: in runs, `reward` is the name of a function."""
    return name in ROLES and isinstance(value, Mapping)


class RollFile:
    """The ROLL keys of a file. `validation`: use the manager and the batch size of validation."""

    def __init__(self, values: Mapping[str, Any], validation: bool) -> None:
        self._values = dict(values)
        self._config = Config(self._values)
        self._mode: Literal["train", "val"] = "val" if validation else "train"
        self._manager, self._batch = f"{self._mode}_env_manager", f"{'val' if validation else 'rollout'}_batch_size"

    @property
    def model(self) -> str | None:
        """The model that the file trains, for the run's own server."""
        name = self._config.get("pretrain")
        return name if isinstance(name, str) else None

    def environments(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[Task, ...]]:
        """The options and tasks of a run in which the environments play.

        `options`: only the seed and the group size count. Raises InvalidRequest for values that AgenticConfig refuses.
        """
        values = self._with(options)
        config = AgenticConfig(values)
        manager: EnvManagerConfig = getattr(config, self._manager)
        tasks = tasks_of(config, self._mode, config.seed)
        self._tell(manager, options)
        found = {
            "agent": AGENT,
            "agent_arg": {"config": _needed(values), "mode": self._mode},
            "group_size": manager.group_size,
            "concurrency": manager.num_env_groups * manager.group_size,
            "seed": config.seed,
        }
        return found, tasks

    def options(self) -> dict[str, Any]:
        """The options of a run with its own agent: sizes, seed, sampling and the token limit.

        Raises InvalidRequest for a misspelt name.
        """
        check_setting_names(self._config)
        manager = self._config.select(self._manager) or {}
        check_names(manager, [each.name for each in fields(EnvManagerConfig)], self._manager, ignored=OF_WORKERS)
        group_size, groups = manager.get("group_size"), manager.get("num_env_groups")
        batch, sequence_length = self._config.get(self._batch), self._config.get("sequence_length")
        found = {
            "group_size": group_size,
            "concurrency": groups and groups * (group_size or 1),
            "limit": batch and batch // (group_size or 1),
            "seed": self._config.get("seed"),
            **self._sampling(),
            "limits": {"max_context_tokens": sequence_length} if sequence_length else None,
        }
        self._say(
            {name: "the agent of the run plays" for name in ("custom_envs", "custom_env") if name in self._values}
        )
        return {name: value for name, value in found.items() if value is not None}

    def _sampling(self) -> dict[str, Any]:
        given = self._config.select("actor_infer.generating_args")
        if given is None:
            return {}
        arguments = made(GeneratingArguments, given.to_dict(), "actor_infer.generating_args")
        return {"sampling": sampling_of(arguments), "sampling_policy": "override"}

    def _with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The values, with the seed and group size of the options."""
        values = {"seed": _SEED, **self._values}
        if options.get("seed") is not None:
            values["seed"] = options["seed"]
        if options.get("group_size") is not None and isinstance(manager := values.get(self._manager), Mapping):
            values[self._manager] = {**manager, "group_size": options["group_size"]}
        return values

    def _tell(self, manager: EnvManagerConfig, options: Mapping[str, Any]) -> None:
        unused = {name: why for name, why in _UNUSED.items() if name in self._values}
        if manager.world_size > 1 and options.get("executor") in (None, "local"):
            unused["max_env_num_per_worker"] = "give executor: process"
        if manager.group_size_redundancy:
            unused["group_size_redundancy"] = "every episode counts"
        if manager.group_filter_cls != GROUP_FILTER:
            unused["group_filter_cls"] = "no group is dropped"
        if self._values.get("apply_reward_discount"):
            unused["apply_reward_discount"] = "give export: {layout: individual}, whose rewards are returns"
        self._say(unused)

    def _say(self, unused: Mapping[str, str]) -> None:
        """Log settings without effect, once per process."""
        new = {name: why for name, why in unused.items() if name not in _said}
        _said.update(new)
        if new:
            told = ", ".join(f"{name} ({why})" for name, why in new.items())
            logger.warning("settings of ROLL that have no effect in a run: %s", told)


def _needed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values without ROLL's training settings, except those that an interpolation needs."""
    used = {name: _of_rollouts(name, value) for name, value in values.items() if name not in {*DEFAULTS, *ROLES}}
    while more := {name for name in set(referred(used)) - used.keys() if name in values}:
        used |= {name: values[name] for name in more}
    return used


def _of_rollouts(name: str, value: Any) -> Any:
    """A manager without its workers' training settings; any other value unchanged."""
    if name not in _MANAGERS or not isinstance(value, Mapping):
        return value
    return {key: each for key, each in value.items() if key not in (*OF_WORKERS, "format_penalty")}
