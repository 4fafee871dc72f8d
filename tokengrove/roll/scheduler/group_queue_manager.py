"""The queue between environments and the trainer: environments take episodes and put results; batches are whole groups.

Every wait ends: with a result, when the place of the waiting environment is released, or with `shutdown`. The place of
an environment that fails or dies is given to another one. Discarded results are passed to `on_discard`.
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
    """The queues of all groups in `env_manager_config`. All methods are thread-safe.

    `group_filter`: an object with the method `filter` of `GroupFilter`; by default, an instance of `group_filter_cls`.
    `on_discard` is called without the lock, in the thread that caused the call. Failed episodes are logged. After
    `max_failed_episodes` of them in a row (default: the limit of `config`, else three groups; -1: no limit),
    `get_batch` raises TooManyFailedEpisodes.
    """

    counts_failures = True
    """Managers need not log failed episodes: the queue does."""

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
        """The step of the last `advance_step`; None: there was none yet."""
        return next((queue.current_step for queue in self.group_queue.values()), None)

    @property
    def closed(self) -> bool:
        return self._stopped.is_set()

    def advance_step(self, step: int) -> None:
        """Add the episodes of a step, and discard those that are more than `async_generation_ratio` steps old."""
        with self._lock:
            lost = [rollout for queue in self.group_queue.values() for rollout in queue.advance_step(step)]
            self._wake_all()
        self._drop("expired", lost)

    def get_episode_id(self, group_id: int, env_id: int | None = None) -> int | None:
        """Wait for an episode to play; None: play no more.

        If the environment has not put the result of its last episode, that place is freed.
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
        """Put a result of an episode; None: the environment plays no more, because the data have ended.

        A result that comes too late for its group is discarded. `start_step` has no effect: an episode has the step of
        its group. Errors are raised by `get_batch`: exceptions of the group filter, TooManyFailedEpisodes, and
        InvalidRequest if the first finished group of a tag lacks the metric that `reward_granularity` names.
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
        """Free the place of an environment that failed during an episode; return the number of results it has put so
        far.
        """
        with self._lock:
            self._end_play(group_id, env_id)
            return self._put[group_id, env_id]

    def leave(self, group_id: int, env_id: int | None) -> None:
        """Record that an environment plays no more.

        Once all environments of its group have left, `get_batch` also takes incomplete groups.
        """
        with self._lock:
            self._end_play(group_id, env_id)
            self.group_queue[group_id].leave(object() if env_id is None else env_id)
            self._deliverable.notify_all()

    def release(self, environments: Collection[tuple[int, int]]) -> int:
        """Free the places of environments that have died. Their calls that wait for an episode return None.

        `environments`: pairs of group id and environment id. Returns the number of results that they have put so far.
        """
        with self._lock:
            for group_id, env_id in environments:
                self._lives[group_id, env_id] += 1
                self._end_play(group_id, env_id)
                self._episodes[group_id].notify_all()
            return sum(self._put[each] for each in environments)

    def fail(self, error: BaseException) -> None:
        """Make `get_batch` raise `error`, for example because nobody can play any more. Only the first error counts."""
        with self._lock:
            self._failure = self._failure or error
            self._deliverable.notify_all()

    def get_batch(self, batch_size: int, current_step: int) -> list[DataProto]:
        """Wait for complete groups and return their results, until there are `batch_size` results.

        There are fewer if the step or the data have no more, and after `shutdown`. A negative `batch_size` takes all
        results until then. Every group of environments gets one turn before any gets a second, and its oldest episode
        comes first. Groups that are more than `async_generation_ratio` steps old are discarded. Raises the error passed
        to `fail` if there is no full batch.
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
        """The metric with the number of groups that were filtered since the last call."""
        with self._lock:
            count = sum(queue.group_filter_count for queue in self.group_queue.values())
            for queue in self.group_queue.values():
                queue.group_filter_count = 0
        return {"scheduler/group_filter_count": count}

    def clear(self) -> None:
        """Restart at episode 0, for environments that are started again. Results in the queue are discarded."""
        with self._lock:
            lost = [rollout for queue in self.group_queue.values() for rollout in queue.clear()]
            self._due.clear()
            self._playing.clear()
        self._drop("unread", lost)

    def wait_closed(self) -> None:
        """Wait for `shutdown`."""
        self._stopped.wait()

    def shutdown(self) -> None:
        """Tell all environments to play no more, and discard unread results.

        A waiting `get_batch` returns what it has.
        """
        with self._lock:
            self._stopped.set()
            self._wake_all()
        self.env_monitor.stop_monitoring()
        self.clear()

    def _is_dropped(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        """Whether the filter drops a complete group. Raises InvalidRequest if the group lacks the metric that scores
        it.
        """
        metrics = [rollout.meta_info.pop(SCORE_METRIC, None) for rollout in group]
        self._score_metrics.check(metric for metric in metrics if metric is not None)
        return bool(self._group_filter.filter(group_id, episode_id, group))

    def _next_group(self) -> GroupData | None:
        """Remove and return a complete group of a queue that had no turn in this round; None: there is none now."""
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
        """Free the place of an environment, if it has one; return how often the environment has died."""
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
            logger.info("%s: %d results discarded: %s", self.mode, len(rollouts), reason)
            self._on_discard(reason, rollouts)


def _group_queues(config: Any, env_manager_config: Any, mode: str, group_filter: Filter) -> dict[int, GroupQueue]:
    """The queue of each group of environments, by group id."""
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
