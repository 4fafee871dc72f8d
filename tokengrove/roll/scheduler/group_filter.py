"""Filters of complete groups: decide which ones are not trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokengrove.roll.values import DataProto


class GroupFilter:
    """Keeps every group. The setting `group_filter_cls` names another class, such as a subclass, that drops some."""

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        self.config, self.env_manager_config, self.mode = config, env_manager_config, mode

    def filter(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        """Return True to drop the group. A new episode is then played in its place.

        `group`: the first `group_size` results of the episode. Calls never overlap.
        """
        return False
