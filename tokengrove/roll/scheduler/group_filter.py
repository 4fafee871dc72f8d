"""Decides which complete groups are not worth training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokengrove.roll.values import DataProto


class GroupFilter:
    """Keeps every group. A subclass that `group_filter_cls` names decides otherwise."""

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        self.config, self.env_manager_config, self.mode = config, env_manager_config, mode

    def filter(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        """Return True to drop the group; it is then played again as a new episode.

        `group` has the results that count, `group_size` of them. Calls come one after the other.
        """
        return False
