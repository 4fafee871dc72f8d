"""ROLL's queue of groups, whose environments and trainer are threads: environments fail and die, groups are dropped."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tests.torture import fibres
from tests.torture.runs import World, scenario
from tokengrove.roll.scheduler.group_queue import GroupQueue
from tokengrove.roll.scheduler.group_queue_manager import GroupQueueManager
from tokengrove.roll.values import DataProto

_METHODS = (
    GroupQueueManager.advance_step,
    GroupQueueManager.get_episode_id,
    GroupQueueManager.put,
    GroupQueueManager.give_back,
    GroupQueueManager.leave,
    GroupQueueManager.release,
    GroupQueueManager.get_batch,
    GroupQueueManager.shutdown,
    GroupQueueManager.clear,
)
_SLOW_S, _LATE_S = 60.0, 20.0
"""How long a slow episode takes, and how long no environment waits that could play."""


class _Thread(fibres.Thread):
    """May be interrupted at each line of the queue."""

    preempted = frozenset(method.__code__ for method in _METHODS)


class _Queue:
    """A queue of `groups` groups of environments, for `steps` steps; each needs a whole batch to go on.

    `endless`: for all that the environments play until each of them has no more data, in one batch.
    """

    def __init__(self, world: World, *, endless: bool = False) -> None:
        random = world.random
        self._world = world
        self.groups, self.size, self.redundancy = random.randrange(1, 4), random.randrange(1, 4), random.randrange(2)
        self.most, self.steps = random.randrange(1, 3), random.randrange(1, 4)
        self.batch = self.groups * self.size * self.most
        self._drops = random.choice([0.0, 0.3, 0.6])
        self._fails = random.choice([0.0, 0.1])
        self._waiting: set[int] = set()
        self._endless = endless
        self._left: set[int] = set()
        self._players = Counter[tuple[int, int]]()
        self.error = RuntimeError("an environment cannot be made")
        self._idle_s = 0.0
        self.put: set[int] = set()
        self.filtered: set[int] = set()
        self.batches: list[list[int]] = []
        self.dropped: list[int] = []
        places = {env_id: {"group_id": group} for group, envs in self._environments().items() for env_id in envs}
        monitor = SimpleNamespace(enable=random.random() < 0.3, monitor_interval=30, hung_timeout=3600)
        self.manager = GroupQueueManager(
            SimpleNamespace(
                rollout_batch_size=-1 if endless else self.batch,
                val_batch_size=-1 if endless else self.batch,
                async_generation_ratio=random.choice([0, 0, 1]),
                env_monitor=monitor,
            ),
            SimpleNamespace(
                group_size=self.size,
                group_size_redundancy=self.redundancy,
                max_traj_per_env=self.most,
                env_configs={0: places},
            ),
            "train",
            group_filter=self,
            on_discard=self._on_dropped,
        )
        self._work = [lambda env=env, group=place["group_id"]: self._plays(group, env) for env, place in places.items()]

    def filter(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        """The group filter: it drops some groups by chance."""
        assert len(group) == self.size, "a group that is not whole was filtered"
        if self._world.random.random() < self._drops:
            self.filtered |= {each.meta_info["number"] for each in group}
            return True
        return False

    def work(self) -> list[Callable[[], None]]:
        """What the threads do: the trainer's first, then that of each environment."""
        return [self._trains, *self._work]

    def check_idle(self, passed_s: float) -> None:
        """Call it every `passed_s`. Raises AssertionError if an environment waits while there is an episode for it."""
        places = {env_id: group for group, envs in self._environments().items() for env_id in envs}
        free = {group for group, queue in self.manager.group_queue.items() if self._has_place(queue)}
        idle = [env_id for env_id in self._waiting if places[env_id] in free]
        self._idle_s = self._idle_s + passed_s if idle and not self.manager.closed else 0.0
        assert self._idle_s < _LATE_S, f"nobody woke the environments {idle}"

    def _environments(self) -> dict[int, list[int]]:
        final = self.size + self.redundancy
        return {group: list(range(group * final, (group + 1) * final)) for group in range(self.groups)}

    def _has_place(self, queue: GroupQueue) -> bool:
        places = self.size + self.redundancy
        return any(
            group.running_rollouts < places and len(group.rollouts) < self.size for group in queue.groups.values()
        )

    def _on_dropped(self, reason: str, rollouts: Sequence[DataProto]) -> None:
        self.dropped += [each.meta_info["number"] for each in rollouts]

    def _plays(self, group_id: int, env_id: int) -> None:
        """Play until there is nothing more; some episodes fail, and some processes die and are started again."""
        random = self._world.random
        self._waiting.add(env_id)
        left = random.randrange(1, 4) if self._endless else 1_000_000
        while left and (episode_id := self.manager.get_episode_id(group_id, env_id)) is not None:
            self._waiting.discard(env_id)
            self._players[group_id, episode_id] += 1
            assert self._players[group_id, episode_id] <= self.size + self.redundancy, "an episode has too many players"
            fibres.sleep(_SLOW_S if random.random() < 0.1 else random.uniform(0.0, 0.1))
            if (chance := random.random()) < self._fails:
                self._players[group_id, episode_id] -= 1
                if self._endless and chance < self._fails / 4:
                    return self.manager.fail(self.error)
                if chance < self._fails / 2:
                    self.manager.give_back(group_id, env_id)
                else:
                    self.manager.release([(group_id, env_id)])
                if random.random() < 0.5:
                    fibres.sleep(_SLOW_S)  # to start again takes time, in which another one can play
                self._waiting.add(env_id)
                continue
            number = len(self.put)
            self.put.add(number)
            rollout = DataProto(meta_info={"number": number, "group": (group_id, episode_id)})
            self.manager.put(group_id, episode_id, 0, rollout, env_id)
            self._waiting.add(env_id)
            left -= 1
        self._waiting.discard(env_id)
        if self._endless:
            self._left.add(env_id)
            self.manager.put(group_id, None, 0, None, env_id)

    def _trains(self) -> None:
        if self._endless:
            self._reads_all()
            return
        for step in range(self.steps):
            self.manager.advance_step(step)
            batch = self.manager.get_batch(self.batch, step)
            assert len(batch) == self.batch, f"a batch has {len(batch)} of {self.batch} results"
            self.batches.append([each.meta_info["number"] for each in batch])
            members: dict[Any, int] = {}
            for each in batch:
                members[each.meta_info["group"]] = members.get(each.meta_info["group"], 0) + 1
            assert set(members.values()) == {self.size}, f"a batch has parts of groups: {members}"
        self.manager.shutdown()

    def _reads_all(self) -> None:
        self.manager.advance_step(0)
        try:
            batch = self.manager.get_batch(-1, 0)
        except RuntimeError as error:
            assert error is self.error
        else:
            assert len(self._left) == self.groups * (self.size + self.redundancy), "environments still play"
            self.batches.append([each.meta_info["number"] for each in batch])
        self.manager.shutdown()


@scenario
async def roll_queue(world: World) -> None:
    """Each step gets a whole batch of whole groups, whatever the filter drops, and each result is used once at most."""
    await _played(_Queue(world), world)


@scenario
async def roll_queue_until_the_data_end(world: World) -> None:
    """The only batch has all that was played, once no environment plays, or fails with the first that cannot."""
    await _played(_Queue(world, endless=True), world)


async def _played(queue: _Queue, world: World) -> None:
    threads = [_Thread(target=work, name=f"thread {number}") for number, work in enumerate(queue.work())]
    world.random.shuffle(threads)
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        await asyncio.sleep(1.0)
        queue.check_idle(1.0)
    delivered: list[int] = [number for batch in queue.batches for number in batch]
    used = sorted([*delivered, *queue.dropped])
    assert used == sorted(set(used)), "a result was used twice"
    assert set(used) == queue.put, "a result was lost"
    assert not queue.filtered & set(delivered), "a batch has results that the filter dropped"
