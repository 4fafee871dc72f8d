"""The queue between environments and trainer: which episodes are played, which results count, and that nobody hangs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from tokengrove.roll import resolve
from tokengrove.roll.scheduler import EnvActivityMonitor, GroupFilter, GroupQueue, GroupQueueManager
from tokengrove.roll.values import DataProto


def config(**changes: Any) -> SimpleNamespace:
    monitor = SimpleNamespace(enable=False, monitor_interval=30, hung_timeout=3600)
    values = {"rollout_batch_size": 4, "val_batch_size": 4, "async_generation_ratio": 0, "env_monitor": monitor}
    return SimpleNamespace(**values | changes)


def environments(groups: int = 1, size: int = 2, redundancy: int = 0, most: int = 1) -> SimpleNamespace:
    final = size + redundancy
    entries = {env_id: {"group_id": env_id // final} for env_id in range(groups * final)}
    return SimpleNamespace(
        group_size=size, group_size_redundancy=redundancy, max_traj_per_env=most, env_configs={0: entries}
    )


def result(name: Any = None) -> DataProto:
    return DataProto(meta_info={"name": name})


def names(batch: Sequence[DataProto]) -> list[Any]:
    return [each.meta_info["name"] for each in batch]


def group_queue(**more: Any) -> GroupQueue:
    given = {"group_filter": lambda *group: False, "environments": 2, **more}
    return GroupQueue(0, group_size=2, **given)


Make = Callable[..., GroupQueueManager]


@pytest.fixture
def make() -> Iterator[Make]:
    """Make queues that are shut down after the test; `dropped` of each is the list of what it has dropped."""
    with ExitStack() as stack:

        def made(entries: Any, mode: str = "train", group_filter: Any = None, **changes: Any) -> GroupQueueManager:
            settings = config(**changes)
            dropped: list[tuple[str, list[Any]]] = []
            queue = GroupQueueManager(
                settings,
                entries,
                mode,
                group_filter=group_filter or GroupFilter(settings, entries, mode),
                on_discard=lambda reason, rollouts: dropped.append((reason, names(rollouts))),
            )
            queue.told = dropped  # type: ignore[attr-defined]
            stack.callback(queue.shutdown)
            return queue

        yield made


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as threads:
        yield threads


def dropped(queue: GroupQueueManager) -> list[tuple[str, list[Any]]]:
    return queue.told  # type: ignore[attr-defined, no-any-return]


def test_episodes_ascend_and_each_has_group_size_and_redundant_places(make: Make) -> None:
    queue = make(environments(size=2, redundancy=1, most=2))
    queue.advance_step(0)
    assert [queue.get_episode_id(0) for _ in range(6)] == [0, 0, 0, 1, 1, 1]


def test_the_first_group_size_results_count_and_later_ones_are_dropped(make: Make) -> None:
    queue = make(environments(size=2, redundancy=1, most=1))
    queue.advance_step(0)
    for env_id in range(3):
        assert queue.get_episode_id(0, env_id) == 0
    queue.put(0, 0, 0, result("c"), 2)
    queue.put(0, 0, 0, result("a"), 0)
    queue.put(0, 0, 0, result("b"), 1)
    assert names(queue.get_batch(2, 0)) == ["c", "a"]
    assert dropped(queue) == [("late", ["b"])]


def test_a_result_is_late_also_after_its_group_has_left(make: Make) -> None:
    queue = make(environments(size=1, redundancy=1, most=1))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, 0), queue.get_episode_id(0, 1)] == [0, 0]
    queue.put(0, 0, 0, result("a"), 0)
    assert names(queue.get_batch(1, 0)) == ["a"]
    queue.put(0, 0, 0, result("b"), 1)
    assert dropped(queue) == [("late", ["b"])]


def test_no_further_place_is_handed_out_in_a_complete_group(make: Make) -> None:
    queue = make(environments(size=1, redundancy=1, most=2))
    queue.advance_step(0)
    queue.put(0, queue.get_episode_id(0, 0), 0, result(), 0)
    assert queue.get_episode_id(0, 0) == 1


class DropsEven(GroupFilter):
    """Drops the groups of the episodes 0 and 2."""

    def filter(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        assert len(group) == 2
        return episode_id in (0, 2)


def test_a_filtered_group_is_played_again_as_a_new_episode_by_whoever_waits(
    make: Make, pool: ThreadPoolExecutor
) -> None:
    queue = make(environments(size=2, most=1), group_filter=DropsEven(None, None, "train"))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, env_id) for env_id in (0, 1)] == [0, 0]
    queue.put(0, 0, 0, result("a0"), 0)
    waiting = pool.submit(queue.get_episode_id, 0, 0)
    queue.put(0, 0, 0, result("b0"), 1)
    assert waiting.result() == 1
    assert queue.get_episode_id(0, 1) == 1
    for env_id in (0, 1):
        queue.put(0, 1, 0, result(f"{env_id}"), env_id)
    assert names(queue.get_batch(2, 0)) == ["0", "1"]
    assert dropped(queue) == [("filtered", ["a0", "b0"])]
    assert queue.collect_metrics() == {"scheduler/group_filter_count": 1}
    assert queue.collect_metrics() == {"scheduler/group_filter_count": 0}


class Broken(GroupFilter):
    def filter(self, group_id: int, episode_id: int, group: Sequence[DataProto]) -> bool:
        raise ZeroDivisionError("in the filter")


def test_what_a_filter_raises_is_raised_to_the_trainer(make: Make) -> None:
    queue = make(environments(size=1), group_filter=Broken(None, None, "train"))
    queue.advance_step(0)
    queue.put(0, queue.get_episode_id(0, 0), 0, result(), 0)
    with pytest.raises(ZeroDivisionError, match="in the filter"):
        queue.get_batch(1, 0)


def test_results_that_a_failing_batch_had_are_discarded_with_a_call(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments(size=1, most=2))
    queue.advance_step(0)
    queue.put(0, queue.get_episode_id(0, 0), 0, result("a"), 0)
    taking = pool.submit(queue.get_batch, 2, 0)
    while queue.group_queue[0].first() is not None:
        pass  # until the batch has it
    queue.fail(ZeroDivisionError("nobody can play"))
    with pytest.raises(ZeroDivisionError):
        taking.result()
    assert dropped(queue) == [("unread", ["a"])]


def test_without_async_generation_episodes_of_an_older_step_expire(make: Make) -> None:
    queue = make(environments(size=2, most=1))
    queue.advance_step(0)
    assert queue.get_episode_id(0, 0) == 0
    queue.put(0, 0, 0, result("old"), 0)
    assert queue.get_episode_id(0, 1) == 0
    queue.advance_step(1)
    queue.put(0, 0, 0, result("older"), 1)
    assert queue.get_episode_id(0, 0) == 1
    assert dropped(queue) == [("expired", ["old"]), ("late", ["older"])]


def test_async_generation_plays_ahead_and_keeps_what_is_young_enough(make: Make) -> None:
    queue = make(environments(size=1, most=1), async_generation_ratio=1)
    queue.advance_step(0)
    assert [queue.get_episode_id(0, 0), queue.get_episode_id(0, 1)] == [0, 1]  # one step ahead
    queue.put(0, 0, 0, result("0"), 0)
    queue.put(0, 1, 0, result("1"), 1)
    assert names(queue.get_batch(1, 0)) == ["0"]
    queue.advance_step(1)
    assert names(queue.get_batch(1, 1)) == ["1"]
    assert queue.get_episode_id(0, 0) == 2
    queue.put(0, 2, 1, result("2"), 0)
    queue.advance_step(3)
    assert dropped(queue) == [("expired", ["2"])]


@pytest.mark.parametrize(("ratio", "first", "second"), [(0, 2, 2), (0.5, 4, 2), (1, 4, 6), (1.5, 6, 8)])
def test_only_the_first_step_adds_the_episodes_of_the_steps_ahead_whole_steps(
    ratio: float, first: int, second: int
) -> None:
    queue = group_queue(max_traj_per_env=2, async_generation_ratio=ratio)
    queue.advance_step(0)
    assert len(queue.groups) == first
    queue.advance_step(1)
    assert len(queue.groups) == second  # what is older than the ratio has expired


def test_one_place_that_is_given_back_is_one_place() -> None:
    queue = group_queue(max_traj_per_env=2)
    queue.advance_step(0)
    assert [queue.next_episode() for _ in range(2)] == [0, 0]
    queue.give_back(0)
    assert [queue.next_episode() for _ in range(4)] == [0, 1, 1, None]


def test_the_episode_in_place_of_a_filtered_one_is_of_the_current_step() -> None:
    queue = group_queue(max_traj_per_env=1, async_generation_ratio=1, group_filter=lambda *group: True)
    for step in (0, 1):
        queue.advance_step(step)
    assert [len(queue.put(0, result())) for _ in range(2)] == [0, 2]
    assert [(group.episode_id, group.create_step) for group in queue.groups.values()] == [(1, 0), (2, 1), (3, 1)]


def test_a_queue_that_begins_anew_waits_for_all_environments_again() -> None:
    queue = group_queue(max_traj_per_env=2)
    queue.advance_step(0)
    queue.leave(0)
    queue.put(0, result("half"))
    assert queue.first() is None and not queue.ended
    queue.leave(1)
    due = queue.first()
    assert due is not None and names(due.rollouts) == ["half"]
    del queue.groups[due.episode_id]
    assert queue.first() is None and queue.exhausted  # nobody plays the second episode
    queue.clear()
    queue.advance_step(0)
    queue.put(0, result())
    assert queue.first() is None and not queue.exhausted


def test_validation_has_no_async_generation(make: Make) -> None:
    queue = make(environments(size=1, most=1), mode="val", async_generation_ratio=3)
    queue.advance_step(0)
    assert len(queue.group_queue[0].groups) == 1


def test_each_mode_has_its_own_batch_size_which_says_whether_episodes_are_limited(make: Make) -> None:
    sizes = {"rollout_batch_size": 4, "val_batch_size": -1}
    limits = [make(environments(most=3), mode, **sizes).group_queue[0].max_traj_per_env for mode in ("train", "val")]
    assert limits == [3, None]


def test_the_place_of_an_environment_that_leaves_or_dies_is_free_for_another(make: Make) -> None:
    queue = make(environments(size=2, redundancy=1, most=1))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, env_id) for env_id in range(3)] == [0, 0, 0]
    places = queue.group_queue[0]
    assert places.next_episode() is None
    queue.leave(0, 0)
    assert [places.next_episode() for _ in range(2)] == [0, None]
    queue.release([(0, 1)])
    assert [places.next_episode() for _ in range(2)] == [0, None]


def test_a_group_whose_environments_have_left_holds_no_other_up(make: Make) -> None:
    queue = make(environments(groups=2, size=1, most=2))
    queue.advance_step(0)
    queue.leave(1, 1)
    for episode_id in range(2):
        queue.put(0, episode_id, 0, result())
    assert [group and group.episode_id for group in (queue._next_group(), queue._next_group())] == [0, 1]


def test_a_new_beginning_knows_neither_turns_nor_places_of_before(make: Make) -> None:
    queue = make(environments(groups=2, size=1, most=1))
    queue.advance_step(0)
    assert queue.get_episode_id(1, 1) == 0
    queue.put(0, 0, 0, result())
    assert len(queue.get_batch(1, 0)) == 1  # it is the other group's turn
    queue.clear()
    queue.advance_step(0)
    places = queue.group_queue[1]
    assert places.next_episode() == 0
    queue.give_back(1, 1)
    assert places.next_episode() is None
    queue.put(0, 0, 0, result())
    assert queue._next_group() is not None


def test_no_thread_of_the_monitor_is_left_after_a_shutdown(make: Make) -> None:
    queue = make(environments(), env_monitor=SimpleNamespace(enable=True, monitor_interval=3600, hung_timeout=3600))
    watching = queue.env_monitor._thread
    assert watching is not None and watching.is_alive()
    queue.shutdown()
    assert not watching.is_alive()


def test_a_group_that_is_too_old_for_the_step_of_a_batch_is_discarded_with_a_call(make: Make) -> None:
    queue = make(environments(size=1, most=1))
    queue.advance_step(0)
    queue.put(0, 0, 0, result("old"))
    assert (queue.get_batch(1, 1), dropped(queue)) == ([], [("expired", ["old"])])


def test_a_group_waits_for_its_first_episode_though_a_later_one_is_complete(
    make: Make, pool: ThreadPoolExecutor
) -> None:
    queue = make(environments(size=1, most=2))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, 0), queue.get_episode_id(0, 1)] == [0, 1]
    queue.put(0, 1, 0, result("second"), 1)
    batch = pool.submit(queue.get_batch, 2, 0)
    queue.put(0, 0, 0, result("first"), 0)
    assert names(batch.result()) == ["first", "second"]


def test_no_group_has_a_second_turn_before_the_others_had_one(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments(groups=2, size=1, most=3))
    queue.advance_step(0)
    for episode_id in range(3):
        assert queue.get_episode_id(0, 0) == episode_id
        queue.put(0, episode_id, 0, result(f"fast{episode_id}"), 0)
    assert names(queue.get_batch(1, 0)) == ["fast0"]
    batch = pool.submit(queue.get_batch, 2, 0)
    assert queue.get_episode_id(1, 1) == 0
    queue.put(1, 0, 0, result("slow"), 1)
    assert names(batch.result()) == ["slow", "fast1"]


def test_an_environment_that_fails_gives_its_place_back_to_whoever_waits(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments(size=2, most=1))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, env_id) for env_id in (0, 1)] == [0, 0]
    queue.put(0, 0, 0, result("b"), 1)
    waiting = pool.submit(queue.get_episode_id, 0, 1)
    assert queue.give_back(0, 0) == 0
    assert waiting.result() == 0
    queue.put(0, 0, 0, result("again"), 1)
    assert names(queue.get_batch(2, 0)) == ["b", "again"]
    assert queue.give_back(0, 1) == 2  # how many results it has put


def test_an_environment_that_asks_again_without_a_result_has_not_taken_two_places(make: Make) -> None:
    queue = make(environments(size=2, most=1))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, 0) for _ in range(5)] == [0] * 5
    assert queue.get_episode_id(0, 1) == 0


def test_dead_environments_wait_no_longer_and_their_places_are_free(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments(size=1, redundancy=1, most=1))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, 0), queue.get_episode_id(0, 1)] == [0, 0]
    queue.put(0, 0, 0, result(), 1)
    queue.get_batch(1, 0)
    dead = pool.submit(queue.get_episode_id, 0, 1)
    while not queue._episodes[0]._waiters:  # type: ignore[attr-defined]
        pass
    assert queue.release([(0, 0), (0, 1)]) == 1
    assert dead.result() is None
    queue.advance_step(1)
    assert queue.get_episode_id(0, 1) == 1  # its next life


def test_the_data_end_when_all_environments_say_so(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments(groups=2, size=1, most=1))
    queue.advance_step(0)
    batch = pool.submit(queue.get_batch, 4, 0)
    assert queue.get_episode_id(0, 0) == 0
    queue.put(0, 0, 0, result("last"), 0)
    queue.put(0, None, 0, None, 0)
    queue.put(1, 0, 0, None, 1)
    assert names(batch.result()) == ["last"]
    assert queue.get_batch(4, 0) == []


def test_a_group_that_cannot_become_complete_is_delivered_at_the_end_of_the_data(make: Make) -> None:
    queue = make(environments(size=2, most=1))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, env_id) for env_id in (0, 1)] == [0, 0]
    queue.put(0, 0, 0, result("alone"), 0)
    queue.put(0, 0, 0, None, 1)
    queue.put(0, None, 0, None, 0)
    assert names(queue.get_batch(2, 0)) == ["alone"]


def test_a_negative_batch_size_means_all_episodes_until_nobody_plays(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments(groups=2, size=2, most=1), rollout_batch_size=-1)

    def play(group_id: int, env_id: int) -> None:
        while (episode_id := queue.get_episode_id(group_id, env_id)) is not None and episode_id < 5:
            queue.put(group_id, episode_id, 0, result((group_id, episode_id)), env_id)
        queue.put(group_id, episode_id, 0, None, env_id)

    players = [pool.submit(play, env_id // 2, env_id) for env_id in range(4)]
    queue.advance_step(0)
    batch = names(queue.get_batch(-1, 0))
    for player in players:
        player.result()
    assert sorted(batch) == sorted([(group, episode) for group in (0, 1) for episode in range(5)] * 2)
    queue.clear()
    queue.advance_step(1)
    assert queue.get_episode_id(0, 0) == 0


def test_a_step_that_has_too_few_episodes_gives_what_it_has(make: Make) -> None:
    queue = make(environments(groups=2, size=1, most=1))
    queue.advance_step(0)
    assert queue.get_episode_id(0, 0) == 0
    queue.put(0, 0, 0, result("last"), 0)
    queue.put(1, 0, 0, None, 1)  # the data of one group have ended, and the other waits for the next step
    assert names(queue.get_batch(2, 0)) == ["last"]


def test_shutdown_wakes_everybody_and_drops_what_nobody_has_read(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments(groups=2, size=1, redundancy=1, most=1))
    queue.advance_step(0)
    assert [queue.get_episode_id(0, 0), queue.get_episode_id(0, 1)] == [0, 0]
    queue.put(0, 0, 0, result("unread"), 0)
    waiting: list[Future[Any]] = [pool.submit(queue.get_episode_id, 0, 0)]
    queue.shutdown()
    assert [each.result() for each in waiting] == [None]
    assert queue.get_batch(2, 0) == []
    assert dropped(queue) == [("unread", ["unread"])]


def test_shutdown_ends_a_batch_that_is_waited_for(make: Make, pool: ThreadPoolExecutor) -> None:
    queue = make(environments())
    queue.advance_step(0)
    batch = pool.submit(queue.get_batch, 2, 0)
    queue.shutdown()
    assert batch.result() == []


def test_many_environments_and_steps_lose_nothing_and_train_nothing_twice(make: Make, pool: ThreadPoolExecutor) -> None:
    entries = environments(groups=3, size=3, redundancy=1, most=2)
    queue = make(entries, rollout_batch_size=18)

    def play(group_id: int, env_id: int) -> int:
        count = 0
        while (episode_id := queue.get_episode_id(group_id, env_id)) is not None:
            queue.put(group_id, episode_id, 0, result((group_id, episode_id, env_id, count)), env_id)
            count += 1
        return count

    players = [pool.submit(play, entry["group_id"], env_id) for env_id, entry in entries.env_configs[0].items()]
    got = []
    for step in range(20):
        queue.advance_step(step)
        batch = names(queue.get_batch(18, step))
        assert sorted((group, episode) for group, episode, _, _ in batch) == sorted(
            [(group, 2 * step + turn) for group in range(3) for turn in range(2)] * 3
        )
        got += batch
    queue.shutdown()
    played = sum(player.result() for player in players)
    late = [name for _, those in dropped(queue) for name in those]
    assert len(set(got + late)) == len(got) + len(late) == played


def test_the_monitor_warns_of_environments_that_play_for_too_long(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    monitor = EnvActivityMonitor(SimpleNamespace(enable=True, monitor_interval=1, hung_timeout=60), lambda: now[0])
    for env_id in range(8):
        monitor.record_episode_start(3, env_id, 7)
    now[0] = 60.0
    assert monitor.check_and_log_hung_envs() == []
    monitor.record_end(3, 0)
    now[0] = 61.5
    with caplog.at_level(logging.WARNING):
        assert [tuple(each) for each in monitor.check_and_log_hung_envs()] == [(3, n, 7, 61) for n in range(1, 8)]
    assert "group 3 has 7 environments that hang: environment 1 (episode 7, 61 s)" in caplog.text
    assert "and 2 more" in caplog.text


def test_the_queue_tells_the_monitor_who_plays(make: Make) -> None:
    monitor = SimpleNamespace(enable=True, monitor_interval=1000, hung_timeout=-1)
    queue = make(environments(size=2, most=1), env_monitor=monitor)
    queue.advance_step(0)
    for env_id in (0, 1):
        queue.get_episode_id(0, env_id)
    queue.put(0, 0, 0, result(), 0)
    assert [each.env_id for each in queue.env_monitor.check_and_log_hung_envs()] == [1]
    queue.give_back(0, 1)
    assert queue.env_monitor.check_and_log_hung_envs() == []


def test_the_agent_native_filter_drops_flagged_groups_but_at_most_half_of_all() -> None:
    dropping = resolve("roll.pipeline.agentic.env_manager.agent_native_env_manager.GroupFilter")(None, None, "train")
    flagged = [result(), DataProto(meta_info={"drop_flag": True})]
    groups = [flagged, [result()], flagged, flagged, flagged]
    assert [dropping.filter(0, number, group) for number, group in enumerate(groups)] == [
        False,
        False,
        True,
        True,
        False,
    ]
