"""The episodes of a batch of ROLL as tasks: a group is a task, its environments are the samples.

Groups take turns, as in ROLL: each plays its first episode, then each its second, until the batch is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, cast

from tokengrove.client.options import SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import AgenticConfig, EnvManagerConfig, resolve
from tokengrove.roll.managers import BaseEnvManager
from tokengrove.roll.managers.episode_session import terms_of
from tokengrove.rollout.episodes import Task


def tasks_of(config: AgenticConfig, mode: Literal["train", "val"], seed: int) -> tuple[Task, ...]:
    """One batch: `rollout_batch_size` episodes of the train manager, or `val_batch_size` of the validation manager.

    The seed of a task is the run's `seed` plus its group's seed plus the number of the episode; all samples share it.
    Its `options` are those of the sessions of its tag. Raises InvalidRequest for a manager without environments, and
    for a batch without a number of episodes.
    """
    manager: EnvManagerConfig = getattr(config, f"{mode}_env_manager")
    name = "rollout_batch_size" if mode == "train" else "val_batch_size"
    batch_size: int = getattr(config, name)
    groups = list(_groups(manager))
    if not groups:
        raise InvalidRequest(
            f"{mode}_env_manager has no environments to play; give it tags and num_env_groups",
            param=f"{mode}_env_manager",
        )
    if batch_size <= 0:
        raise InvalidRequest(
            f"{name} is {batch_size}, which means all episodes until the data end; a run needs their number", param=name
        )
    options = {each["tag"]: _options(config, manager, each, mode) for each in groups}
    count = batch_size // manager.group_size
    return tuple(_task(groups[at % len(groups)], at // len(groups), seed, options) for at in range(count))


def _groups(manager: EnvManagerConfig) -> Iterator[Any]:
    """The first environment of each group."""
    seen: set[int] = set()
    for environments in manager.env_configs.values():
        for entry in environments.values():
            if entry["group_id"] not in seen:
                seen.add(entry["group_id"])
                yield entry


def _task(entry: Any, episode: int, seed: int, options: dict[str, SessionOptions]) -> Task:
    tag, group_id = entry["tag"], entry["group_id"]
    data = {"tag": tag, "group_id": group_id, "episode_id": episode, "seed": seed + entry["group_seed"] + episode}
    return Task(f"{tag}-{group_id}-{episode}", data, options[tag])


def _options(config: AgenticConfig, manager: EnvManagerConfig, entry: Any, mode: str) -> SessionOptions:
    """Fields of the sessions of a tag."""
    manager_class: type[BaseEnvManager] = resolve(entry["env_manager_cls"], "env_manager_cls")
    about = {"tag": entry["tag"], "exp_name": config.exp_name, "mode": mode}
    options = {**terms_of(entry, manager, config), **manager_class.session_options(entry, manager), "metadata": about}
    return cast(SessionOptions, options)
