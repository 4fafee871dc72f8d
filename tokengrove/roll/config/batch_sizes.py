"""The number of episodes of each environment in a batch, by ROLL's rules: a batch consists of whole groups."""

from __future__ import annotations

import sys

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config.env_manager_config import EnvManagerConfig


def fit_train(manager: EnvManagerConfig, batch_size: int, async_generation_ratio: float) -> None:
    """Set `max_traj_per_env` for `rollout_batch_size`; a negative size means no batch. Raises InvalidRequest.

    If generation runs ahead (`async_generation_ratio` above 0), it is always the number that a batch needs.
    """
    needed = _needed(manager, batch_size)
    if async_generation_ratio > 0 or manager.max_traj_per_env < 0:
        manager.max_traj_per_env = needed
    _check_enough(manager, needed, "rollout_batch_size", batch_size)
    if batch_size > 0:
        _check_groups(manager, "rollout_batch_size", batch_size)


def fit_val(manager: EnvManagerConfig, batch_size: int) -> None:
    """Set `max_traj_per_env` for `val_batch_size`; with a negative size episodes are played until the data ends.

    All validation environments play the same number of episodes. Raises InvalidRequest.
    """
    if batch_size < 0:
        manager.max_traj_per_env = sys.maxsize
        return
    _check_groups(manager, "val_batch_size", batch_size)
    environments = manager.num_env_groups * manager.group_size
    if batch_size % environments:
        raise InvalidRequest(
            f"val_batch_size={batch_size} must be a multiple of the {environments} validation environments "
            f"({manager.section}num_env_groups={manager.num_env_groups} times group_size={manager.group_size}); "
            f"equal is best: val_batch_size={environments}",
            param="val_batch_size",
        )
    needed = _needed(manager, batch_size)
    if manager.max_traj_per_env < 0:
        manager.max_traj_per_env = needed
    _check_enough(manager, needed, "val_batch_size", batch_size)


def _needed(manager: EnvManagerConfig, batch_size: int) -> int:
    """Episodes of each environment, rounded up. Redundant environments of a group do not count."""
    return -(-batch_size // (manager.num_env_groups * manager.group_size))


def _check_enough(manager: EnvManagerConfig, needed: int, name: str, batch_size: int) -> None:
    if manager.max_traj_per_env < needed:
        raise InvalidRequest(
            f"{manager.section}max_traj_per_env={manager.max_traj_per_env} is too small for {name}={batch_size}: "
            f"each environment must play {needed} episodes; raise it, leave it out, or raise num_env_groups",
            param=f"{manager.section}max_traj_per_env",
        )


def _check_groups(manager: EnvManagerConfig, name: str, batch_size: int) -> None:
    size = manager.group_size
    if batch_size % size:
        near = batch_size - batch_size % size
        ways = " or ".join(str(each) for each in (near, near + size) if each > 0)
        raise InvalidRequest(
            f"{name}={batch_size} must be a multiple of {manager.section}group_size={size}, because a batch consists "
            f"of whole groups; write {name}={ways}, or change group_size",
            param=name,
        )
