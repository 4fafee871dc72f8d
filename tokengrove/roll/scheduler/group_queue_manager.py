"""The queue between environments and the trainer: environments take episodes and put results, batches leave in groups.

Every wait ends: with a result, when the environment's place is taken from it, or with `shutdown`. An environment that
fails or dies gives its place back, so a group lacks nobody for long. Discarded results are passed to `on_discard`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tokengrove.roll.config import resolve
from tokengrove.roll.scheduler.env_activity_monitor import EnvActivityMonitor
from tokengrove.roll.scheduler.group_queue import Filter, GroupData, GroupQueue
from tokengrove.roll.values import DataProto
from tokengrove.roll.values.score_metric import SCORE_METRIC, ScoreMetrics
from tokengrove.rollout.failure_log import FailedEpisode, FailureLog, TooManyFailedEpisodes

logger = logging.getLogger(__name__)
OnDiscard = Callable[[str, Sequence[DataProto]], None]
"""Called with the reason (`late`, `filtered`, `expired` or `unread`) and the results."""


class GroupQueueManager:
    """The groups of all environments of `env_manager_config`. All methods may be called from any thread.

    `group_filter` has a method `filter` as `GroupFilter`; by default it is one of `group_filter_cls`. `on_discard` is
    called without the lock, in the thread that was the cause. The log warns of episodes that fail, and after
    `max_failed_episodes` in a row (default: `config`'s, or three groups' worth) `get_batch` raises.
    """

    counts_failures = True
    """Managers need not warn of failed episodes themselves."""

    def __init__(
        self,
        config: Any,
        env_manager_config: Any,
        mode: str,
        *,
        group_filter: Any = None,
        on_discard: OnDiscard = lambda reason, rollouts: None,
        max_failed_episodes: int | None = None,
    ) -> None:
        self.mode = mode
        most = getattr(config, "max_failed_episodes", None) if max_failed_episodes is None else max_failed_episodes
        self.failures = FailureLog(most, env_manager_config.group_size, f"{mode}: an episode")
        self.env_monitor = EnvActivityMonitor(config.env_monitor)
        self._group_size: int = env_manager_config.group_size
        self._on_discard = on_discard
        self._lock = threading.RLock()
        self._deliverable = threading.Condition(self._lock)
        self._stopped = threading.Event()
        self._failure: BaseException | None = None
        self._playing: dict[tuple[int, int], int] = {}
        self._lives: Counter[tuple[int, int]] = Counter()
        self._put: Counter[tuple[int, int]] = Counter()
        self._due: set[int] = set()
        if group_filter is None:
            filter_class = resolve(env_manager_config.group_filter_cls, "group_filter_cls")
            group_filter = filter_class(config, env_manager_config, mode)
        self._group_filter = group_filter
        self.group_queue = _group_queues(config, env_manager_config, mode, self._is_dropped)
        self._score_metrics = ScoreMetrics()
        self._episodes = {group_id: threading.Condition(self._lock) for group_id in self.group_queue}
        self.env_monitor.start_monitoring()

    @property
    def current_step(self) -> int | None:
        """The step that was advanced to last."""
        return next((queue.current_step for queue in self.group_queue.values()), None)

    @property
    def closed(self) -> bool:
        return self._stopped.is_set()

    def advance_step(self, step: int) -> None:
        """Add the episodes of a step; the older ones expire by `async_generation_ratio`."""
        with self._lock:
            lost = [rollout for queue in self.group_queue.values() for rollout in queue.advance_step(step)]
            self._wake_all()
        self._drop("expired", lost)

    def get_episode_id(self, group_id: int, env_id: int | None = None) -> int | None:
        """Wait for an episode to play; None: play no more.

        An environment that has not put its last episode gives that place back.
        """
        queue = self.group_queue[group_id]
        with self._lock:
            life = self._end_play(group_id, env_id)
            while not self.closed and (env_id is None or self._lives[group_id, env_id] == life):
                if (episode_id := queue.next_episode()) is not None:
                    self._begin_play(group_id, env_id, episode_id)
                    return episode_id
                self._episodes[group_id].wait()
        return None

    def put(
        self,
        group_id: int,
        episode_id: int | None,
        start_step: int,
        rollout: DataProto | None,
        env_id: int | None = None,
    ) -> None:
        """Put a result of an episode; None: the environment plays no more, as there are no data left.

        A result that comes too late for its group is dropped. What the group filter raises, `get_batch` raises, and
        TooManyFailedEpisodes, and so it does for a first group without the metric that `reward_granularity` names. An
        episode's step is that of its group, whatever `start_step` says.
        """
        if rollout is None or episode_id is None:
            self.leave(group_id, env_id)
            return
        try:
            self.failures.note(FailedEpisode.told_in(getattr(rollout, "meta_info", {})))
        except TooManyFailedEpisodes as error:
            self.fail(error)
        queue = self.group_queue[group_id]
        with self._lock:
            filtered = queue.group_filter_count
            if env_id is not None:
                self._playing.pop((group_id, env_id), None)
                self._put[group_id, env_id] += 1
                self.env_monitor.record_end(group_id, env_id)
            try:
                lost = queue.put(episode_id, rollout)
            except Exception as error:
                self.fail(error)
                return
            if queue.first() is not None:
                self._deliverable.notify_all()
            if queue.group_filter_count > filtered:
                self._episodes[group_id].notify_all()
        self._drop("filtered" if queue.group_filter_count > filtered else "late", lost)

    def give_back(self, group_id: int, env_id: int) -> int:
        """An environment has failed in the middle of an episode; return how many results it has put so far."""
        with self._lock:
            self._end_play(group_id, env_id)
            return self._put[group_id, env_id]

    def leave(self, group_id: int, env_id: int | None) -> None:
        """An environment plays no more; once none of its group does, `get_batch` takes what the group has."""
        with self._lock:
            self._end_play(group_id, env_id)
            self.group_queue[group_id].leave(object() if env_id is None else env_id)
            self._deliverable.notify_all()

    def release(self, environments: Collection[tuple[int, int]]) -> int:
        """Environments (group, environment) have died: those that wait get None, and the places are free again.

        Return how many results they have put so far.
        """
        with self._lock:
            for group_id, env_id in environments:
                self._lives[group_id, env_id] += 1
                self._end_play(group_id, env_id)
                self._episodes[group_id].notify_all()
            return sum(self._put[each] for each in environments)

    def fail(self, error: BaseException) -> None:
        """Let `get_batch` raise this error: nobody can play any more."""
        with self._lock:
            self._failure = self._failure or error
            self._deliverable.notify_all()

    def get_batch(self, batch_size: int, current_step: int) -> list[DataProto]:
        """Wait for complete groups and return their results: `batch_size`, or as many as the step and the data have.

        Negative: all, until no environment plays. No group gets a second turn before each had one, and of a group the
        oldest episode comes first. Raises what `fail` was told.
        """
        found: list[DataProto] = []
        lost: list[DataProto] = []
        with self._lock:
            while not self.closed and self._failure is None and (batch_size < 0 or len(found) < batch_size):
                if (group := self._next_group()) is not None:
                    stale = self.group_queue[group.group_id].is_stale(group, current_step)
                    (lost if stale else found).extend(group.rollouts)
                elif all(queue.exhausted for queue in self.group_queue.values()):
                    break
                else:
                    self._deliverable.wait()
            is_short = batch_size < 0 or len(found) < batch_size
            failure = self._failure if is_short and not self.closed else None
        self._drop("expired", lost)
        if failure is not None:
            self._drop("unread", found)
            raise failure
        for rollout in found:
            rollout.meta_info["get_batch_return_start_time"] = time.time()
        return found

    def collect_metrics(self) -> dict[str, int]:
        """How many groups were filtered since the last call."""
        with self._lock:
            count = sum(queue.group_filter_count for queue in self.group_queue.values())
            for queue in self.group_queue.values():
                queue.group_filter_count = 0
        return {"scheduler/group_filter_count": count}

    def clear(self) -> None:
        """Begin anew with episode 0, for environments that are started again."""
        with self._lock:
            lost = [rollout for queue in self.group_queue.values() for rollout in queue.clear()]
            self._due.clear()
            self._playing.clear()
        self._drop("unread", lost)

    def wait_closed(self) -> None:
        """Wait for `shutdown`."""
        self._stopped.wait()

    def shutdown(self) -> None:
        """Tell all environments to play no more, and drop what nobody has read. `get_batch` returns what it has."""
        with self._lock:
            self._stopped.set()
            self._wake_all()
        self.env_monitor.stop_monitoring()
        self.clear()

    def _is_dropped(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        """Ask the filter about a complete group. Raises InvalidRequest if it lacks the metric that scores it."""
        metrics = [rollout.meta_info.pop(SCORE_METRIC, None) for rollout in group]
        self._score_metrics.check(metric for metric in metrics if metric is not None)
        return bool(self._group_filter.filter(group_id, episode_id, group))

    def _next_group(self) -> GroupData | None:
        """The next complete group, from a queue that had no turn in this round; None if there is none now."""
        while True:
            if not self._due:
                self._due = {key for key, queue in self.group_queue.items() if not queue.ended or queue.groups}
            if not self._due:
                return None
            for group_id in sorted(self._due):
                queue = self.group_queue[group_id]
                if (group := queue.first()) is not None:
                    self._due.discard(group_id)
                    del queue.groups[group.episode_id]
                    return group
                if queue.ended:
                    self._due.discard(group_id)
            if self._due:
                return None

    def _begin_play(self, group_id: int, env_id: int | None, episode_id: int) -> None:
        if env_id is not None:
            self._playing[group_id, env_id] = episode_id
            self.env_monitor.record_episode_start(group_id, env_id, episode_id)

    def _end_play(self, group_id: int, env_id: int | None) -> int:
        """Free the place of an environment, if it has one; return which life of the environment this is."""
        if env_id is None:
            return 0
        self.env_monitor.record_end(group_id, env_id)
        if (episode_id := self._playing.pop((group_id, env_id), None)) is not None:
            self.group_queue[group_id].give_back(episode_id)
            self._episodes[group_id].notify_all()
        return self._lives[group_id, env_id]

    def _wake_all(self) -> None:
        for condition in (*self._episodes.values(), self._deliverable):
            condition.notify_all()

    def _drop(self, reason: str, rollouts: Sequence[DataProto]) -> None:
        if rollouts:
            logger.info("%s: %d results dropped: %s", self.mode, len(rollouts), reason)
            self._on_discard(reason, rollouts)


def _group_queues(config: Any, env_manager_config: Any, mode: str, group_filter: Filter) -> dict[int, GroupQueue]:
    """A queue for each group of environments."""
    train = mode == "train"
    batch_size = config.rollout_batch_size if train else config.val_batch_size
    members = Counter(
        entry["group_id"] for entries in env_manager_config.env_configs.values() for entry in entries.values()
    )
    return {
        group_id: GroupQueue(
            group_id,
            group_size=env_manager_config.group_size,
            group_size_redundancy=env_manager_config.group_size_redundancy,
            max_traj_per_env=env_manager_config.max_traj_per_env if batch_size > 0 else None,
            async_generation_ratio=config.async_generation_ratio if train else 0,
            group_filter=group_filter,
            environments=count,
        )
        for group_id, count in members.items()
    }
