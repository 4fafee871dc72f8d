"""The episodes of one group of environments: which are played, and which results count.

Episode ids ascend. Each episode has `group_size + group_size_redundancy` places for environments, and its first
`group_size` results are the group. Nothing here waits or locks; `GroupQueueManager` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tokengrove.roll.values import DataProto

Filter = Callable[[int, int, Sequence[DataProto]], bool]
"""Called with the group id, the episode id and the results of the group. True drops the group."""


@dataclass
class GroupData:
    """One episode of a group. `running_rollouts`: the places that were taken and not given back, also those with a
    result.
    """

    group_id: int
    episode_id: int
    create_step: int
    rollouts: list[DataProto] = field(default_factory=list)
    running_rollouts: int = 0


class GroupQueue:
    """The episodes of the group `group_id`, which `environments` environments play.

    `max_traj_per_env`: the number of episodes that each step adds; None: an episode is added whenever an environment
    needs one. An episode expires when it is more than `async_generation_ratio` steps old.
    """

    def __init__(
        self,
        group_id: int,
        *,
        group_size: int,
        group_size_redundancy: int = 0,
        max_traj_per_env: int | None,
        async_generation_ratio: float = 0,
        group_filter: Filter,
        environments: int,
    ) -> None:
        self.group_id = group_id
        self.group_size = group_size
        self.max_traj_per_env = max_traj_per_env
        self.async_generation_ratio = async_generation_ratio
        self.group_filter = group_filter
        self.group_filter_count = 0
        self.current_step: int | None = None
        self.groups: dict[int, GroupData] = {}
        self._places = group_size + group_size_redundancy
        self._environments = environments
        self._left: set[Hashable] = set()
        self._next_id = 0

    @property
    def ended(self) -> bool:
        """Whether all environments of the group have left."""
        return len(self._left) >= self._environments

    @property
    def exhausted(self) -> bool:
        """Whether no more results can come from this queue in the current step."""
        return not self.groups and (self.ended or self.max_traj_per_env is not None)

    def clear(self) -> list[DataProto]:
        """Restart at episode 0; return the results that were not delivered."""
        lost = [rollout for group in self.groups.values() for rollout in group.rollouts]
        self.groups.clear()
        self._left.clear()
        self.current_step, self._next_id = None, 0
        return lost

    def advance_step(self, step: int) -> list[DataProto]:
        """Add the episodes of a step and remove expired episodes; return the results of the expired ones.

        The first step also adds the episodes of `async_generation_ratio` further steps, rounded up, so that
        environments do not wait.
        """
        times = 1 + math.ceil(self.async_generation_ratio) if self.current_step is None else 1
        lost = [rollout for group in self._expire(step) for rollout in group.rollouts]
        self.current_step = step
        for _ in range(times * (self.max_traj_per_env or 0)):
            self._add_group(step)
        return lost

    def next_episode(self) -> int | None:
        """Take a place in the oldest episode that has one; None: there is none now."""
        for group in self.groups.values():
            if group.running_rollouts < self._places and len(group.rollouts) < self.group_size:
                break
        else:
            if self.max_traj_per_env is not None or self.current_step is None:
                return None
            group = self._add_group(self.current_step)
        group.running_rollouts += 1
        return group.episode_id

    def give_back(self, episode_id: int) -> None:
        """Free a place of an episode that its environment will not finish."""
        if (group := self.groups.get(episode_id)) is not None:
            group.running_rollouts -= 1

    def leave(self, environment: Hashable) -> None:
        """Record that an environment plays no further episode."""
        self._left.add(environment)

    def put(self, episode_id: int, rollout: DataProto) -> list[DataProto]:
        """Add a result; return the results that are dropped: this one if it is late, or the group if it is filtered.

        Raises the exceptions of the filter. The group is then complete, and is kept.
        """
        group = self.groups.get(episode_id)
        if group is None or len(group.rollouts) >= self.group_size:
            return [rollout]
        group.rollouts.append(rollout)
        if len(group.rollouts) < self.group_size:
            return []
        if not self.group_filter(self.group_id, episode_id, group.rollouts):
            return []
        self.group_filter_count += 1
        del self.groups[episode_id]
        self._add_group(group.create_step if self.current_step is None else self.current_step)
        return group.rollouts

    def first(self) -> GroupData | None:
        """The oldest group if it is complete, else None.

        Once all environments have left, a group with some results counts as complete, and groups without results are
        removed.
        """
        while self.groups:
            group = next(iter(self.groups.values()))
            if len(group.rollouts) >= self.group_size or (self.ended and group.rollouts):
                return group
            if not self.ended:
                return None
            del self.groups[group.episode_id]
        return None

    def is_stale(self, group: GroupData, step: int) -> bool:
        return step - group.create_step > self.async_generation_ratio

    def _add_group(self, create_step: int) -> GroupData:
        group = GroupData(self.group_id, self._next_id, create_step)
        self.groups[group.episode_id] = group
        self._next_id += 1
        return group

    def _expire(self, step: int) -> list[GroupData]:
        expired = [group for group in self.groups.values() if self.is_stale(group, step)]
        for group in expired:
            del self.groups[group.episode_id]
        return expired
