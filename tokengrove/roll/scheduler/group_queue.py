"""The episodes of one group of environments: which are played, and which results count.

Episode ids ascend. Each is handed out `group_size + group_size_redundancy` times, and its first `group_size` results
are the group. Nothing here waits or locks: `GroupQueueManager` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tokengrove.roll.values import DataProto

Filter = Callable[[int, int, Sequence[DataProto]], bool]
"""Called with group id, episode id and the group; True drops the group."""


@dataclass
class GroupData:
    """One episode of a group: the results so far, and how many environments have got it."""

    group_id: int
    episode_id: int
    create_step: int
    rollouts: list[DataProto] = field(default_factory=list)
    running_rollouts: int = 0


class GroupQueue:
    """Episodes of the group `group_id`, which `environments` environments play.

    `max_traj_per_env`: how many episodes each step adds; None: as many as are asked for. An episode that is older than
    `async_generation_ratio` steps expires.
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
        """Whether no environment of the group plays any more."""
        return len(self._left) >= self._environments

    @property
    def exhausted(self) -> bool:
        """Whether nothing more can come from it in this step."""
        return not self.groups and (self.ended or self.max_traj_per_env is not None)

    def clear(self) -> list[DataProto]:
        """Begin anew with episode 0; return the results that nobody gets."""
        lost = [rollout for group in self.groups.values() for rollout in group.rollouts]
        self.groups.clear()
        self._left.clear()
        self.current_step, self._next_id = None, 0
        return lost

    def advance_step(self, step: int) -> list[DataProto]:
        """Add the episodes of a step, and remove the expired ones; return the results that these had.

        The first step adds those of `async_generation_ratio` steps more, so that the environments never wait.
        """
        times = 1 + math.ceil(self.async_generation_ratio) if self.current_step is None else 1
        lost = [rollout for group in self._expire(step) for rollout in group.rollouts]
        self.current_step = step
        for _ in range(times * (self.max_traj_per_env or 0)):
            self._add_group(step)
        return lost

    def next_episode(self) -> int | None:
        """Hand out a place in the first episode that has one; None if there is none now."""
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
        """An environment does not play its place to the end; another one may."""
        if (group := self.groups.get(episode_id)) is not None:
            group.running_rollouts -= 1

    def leave(self, environment: Hashable) -> None:
        """An environment plays no further episode."""
        self._left.add(environment)

    def put(self, episode_id: int, rollout: DataProto) -> list[DataProto]:
        """Add a result; return those that this drops: itself if it comes too late, or its group if it is filtered.

        Raises what the filter raises; the group counts then, and is complete.
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
        """The group that is due: the oldest, once it is complete.

        When no environment is left, what the groups have is all that they will have; the empty ones are removed.
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
