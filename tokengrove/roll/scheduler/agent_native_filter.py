"""The group filter of ROLL's agent-native managers: drops groups with an environment that failed to start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tokengrove.roll.scheduler import group_filter
from tokengrove.roll.values import DataProto

_MOST = 0.5


class GroupFilter(group_filter.GroupFilter):
    """Drops a group if the `meta_info` of one of its episodes has `drop_flag`.

    At most half of all groups are dropped; further ones are kept.
    """

    def __init__(self, config: Any, env_manager_config: Any, mode: str) -> None:
        super().__init__(config, env_manager_config, mode)
        self.global_filter_stats = {"total": 0, "filtered": 0}

    def filter(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        """Return True to drop the group."""
        stats = self.global_filter_stats
        stats["total"] += 1
        flagged = any(each.meta_info.get("drop_flag", False) for each in group)
        if not flagged or (stats["filtered"] + 1) / stats["total"] > _MOST:
            return False
        stats["filtered"] += 1
        return True
