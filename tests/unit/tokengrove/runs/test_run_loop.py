"""The loop of a run on an executor that answers as the test says: retries, seeds, room, and how it stops."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import until
from tokengrove.errors import ConfigurationError
from tokengrove.rollout import scheduler
from tokengrove.rollout.episodes import AgentSpec, EpisodePlan, EpisodeResult, Server, Task
from tokengrove.rollout.run_options import RunOptions
from tokengrove.runs import Observer, Summary
from tokengrove.runs.journal import Journal
from tokengrove.runs.run import Run
from tokengrove.runs.slots import Entry, Planner, Slot, slots_of

Answer = Callable[[EpisodePlan], EpisodeResult]


def result_of(plan: EpisodePlan, failure: Any = None, reward: float | None = 1.0) -> EpisodeResult:
    told = None if failure is None else f"{failure} failed"
    given = None if failure else reward
    return EpisodeResult(plan.task.task_id, plan.sample, plan.attempt, plan.session_id, given, {}, failure, told)


class Told:
    """An executor: the answer to a plan is that of `answer`, once `gate` is open."""

    def __init__(self, answer: Answer = result_of) -> None:
        self.answer, self.plans = answer, list[EpisodePlan]()
        self.gate = asyncio.Event()
        self.gate.set()
        self.playing = self.most = 0

    async def play(self, plan: EpisodePlan) -> EpisodeResult:
        self.plans.append(plan)
        self.playing += 1
        self.most = max(self.most, self.playing)
        try:
            await asyncio.sleep(0)
            await self.gate.wait()
            return self.answer(plan)
        finally:
            self.playing -= 1

    async def close(self) -> None:
        """Nothing to close."""


class Watching(Observer):
    def __init__(self) -> None:
        self.told = list[str]()

    def retried(self, result: EpisodeResult) -> None:
        self.told.append(f"retried {result.sample}.{result.attempt}")

    def finished(self, result: EpisodeResult) -> None:
        self.told.append(f"finished {result.sample}.{result.attempt}")

    def stopping(self, why: str) -> None:
        self.told.append(f"stopping: {why}")


class Setup:
    """A run over `tasks` with these options."""

    def __init__(
        self, answer: Answer = result_of, tasks: int = 1, journal: Journal | None = None, **options: Any
    ) -> None:
        self.options = RunOptions(agent="a:b", folder=None, **options).checked()
        self.tasks = [Task(f"t{number}", {}) for number in range(tasks)]
        self.executor, self.observer = Told(answer), Watching()
        self.summary = Summary("r", tasks * self.options.group_size * self.options.passes, self.options.group_size, 1.0)
        planner = Planner("run", self.options, Server("http://s"), AgentSpec("path", "a:b"), seed=7)
        self.run = Run(self.options, planner, self.executor, self.summary, self.observer, journal)

    async def play(self, attempts: Mapping[Slot, int] | None = None) -> None:
        await self.run.play(slots_of(self.tasks, self.options), attempts or {})


def failing(failure: str, times: int) -> Answer:
    """Fail the first attempts at each episode."""
    return lambda plan: result_of(plan, failure if plan.attempt < times else None)


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "FIRST_PAUSE_S", 0.0)


async def test_every_sample_of_every_task_is_played_in_every_pass_with_a_group_of_its_own() -> None:
    setup = Setup(tasks=2, group_size=3, passes=2, concurrency=4)
    await setup.play()
    groups = defaultdict(list)
    for plan in setup.executor.plans:
        groups[plan.options["group_id"]].append(plan.sample)
        assert plan.options["group_size"] == 3
    assert [sorted(samples) for samples in groups.values()] == [[0, 1, 2]] * 4
    assert setup.summary.complete and setup.summary.done == 12
    assert len({plan.session_id for plan in setup.executor.plans}) == 12


async def test_no_more_episodes_than_asked_for_are_played_at_once() -> None:
    setup = Setup(tasks=10, concurrency=3)
    await setup.play()
    assert setup.executor.most == 3


@pytest.mark.parametrize("failure", ["agent", "timeout", "no_data", "reward", "scorer", "server", "worker"])
async def test_a_failure_is_retried_only_if_its_kind_is_asked_for(failure: str) -> None:
    retried = Setup(failing(failure, 2), retries=2, retry_on=(failure,))
    await retried.play()
    assert [plan.attempt for plan in retried.executor.plans] == [0, 1, 2]
    assert (retried.summary.done, retried.summary.retries, retried.summary.failures) == (1, {failure: 2}, {})
    other = Setup(failing(failure, 2), retries=2, retry_on=("worker" if failure != "worker" else "agent",))
    await other.play()
    assert len(other.executor.plans) == 1
    assert (other.summary.done, other.summary.failures) == (0, {failure: 1})


async def test_an_episode_fails_after_its_last_retry_and_the_others_go_on() -> None:
    setup = Setup(
        lambda plan: result_of(plan, "agent" if plan.sample == 1 else None),
        group_size=3,
        retries=1,
        retry_on=("agent",),
    )
    await setup.play()
    assert (setup.summary.done, setup.summary.failed, setup.summary.retries) == (2, 1, {"agent": 1})
    assert {"retried 1.0", "finished 1.1", "finished 0.0", "finished 2.0"} == set(setup.observer.told)


async def test_sessions_of_attempts_that_are_repeated_are_withdrawn_and_those_of_the_last_one_are_kept() -> None:
    setup = Setup(failing("agent", 9), retries=1, retry_on=("agent", "worker"))
    await setup.play()
    assert [plan.discard for plan in setup.executor.plans] == [{"agent", "worker", "cancelled"}, {"cancelled"}]
    assert len({plan.session_id for plan in setup.executor.plans}) == 2
    assert len({plan.options["group_id"] for plan in setup.executor.plans}) == 1


async def test_seeds_differ_by_pass_task_and_sample_and_are_the_same_for_all_attempts_and_runs_of_a_seed() -> None:
    one, other = (
        Setup(failing("agent", 1), 2, group_size=2, passes=2, retry_on=("agent",)),
        Setup(tasks=2, group_size=2, passes=2),
    )
    await one.play()
    await other.play()
    first = [plan.seed for plan in one.executor.plans if plan.attempt == 0]
    assert len(set(first)) == 8 and all(0 <= seed < 2**31 for seed in first)
    assert sorted(plan.seed for plan in one.executor.plans if plan.attempt == 1) == sorted(first)
    assert sorted(plan.seed for plan in other.executor.plans) == sorted(first)


async def test_a_seed_that_is_given_seeds_sampling_too_unless_the_sampling_has_one() -> None:
    for options, seeded in ({"seed": 3}, True), ({}, False):
        setup = Setup(**options)
        await setup.play()
        assert ("seed" in setup.executor.plans[0].options.get("sampling", {})) is seeded
    own = Setup(seed=3, sampling={"seed": 5})
    await own.play()
    assert own.executor.plans[0].options["sampling"] == {"seed": 5}


async def test_options_of_a_task_win_over_those_of_the_run_and_objects_are_merged() -> None:
    setup = Setup(sampling={"temperature": 0.5, "max_tokens": 9}, session={"discount": 0.9}, metadata={"env": "x"})
    setup.tasks = [replace(setup.tasks[0], options={"sampling": {"max_tokens": 3}, "tool_parser": "qwen25"})]
    await setup.play()
    options = setup.executor.plans[0].options
    assert options["sampling"] == {"temperature": 0.5, "max_tokens": 3}
    assert (options["discount"], options["tool_parser"], options["metadata"]["env"]) == (0.9, "qwen25", "x")


async def test_metadata_of_a_run_or_a_task_never_takes_the_place_of_the_runs_own_marks() -> None:
    """By these marks a run that is resumed finds its sessions."""
    setup = Setup(metadata={"tokengrove_run": "mine"})
    setup.tasks = [replace(setup.tasks[0], options={"metadata": {"tokengrove_episode": [9, "x", 9, 9]}})]
    await setup.play()
    metadata = setup.executor.plans[0].options["metadata"]
    assert (metadata["tokengrove_run"], metadata["tokengrove_episode"]) == ("run", [0, "t0", 0, 0])


async def test_tasks_whose_ids_look_alike_have_groups_of_their_own() -> None:
    setup = Setup(tasks=3)
    setup.tasks = [Task(task_id, {}) for task_id in ("a b", "a/b", "a-b")]
    await setup.play()
    assert len({plan.options["group_id"] for plan in setup.executor.plans}) == 3


@pytest.mark.parametrize(
    ("given", "where", "value"),
    [
        ({"timeout_s": 3.0}, "timeout_s", 3.0),
        ({"start_timeout_s": 4.0}, "start_timeout_s", 4.0),
        ({"scoring_timeout_s": 5.0}, "scoring_timeout_s", 5.0),
        ({"reward": "m:f"}, "reward", "m:f"),
        ({"scorer": ("m:f", "m:g")}, "scorers", ("m:f", "m:g")),
        ({"validation": True}, "validation", True),
    ],
)
async def test_an_option_is_in_the_plans(given: dict[str, Any], where: str, value: object) -> None:
    setup = Setup(**given)
    await setup.play()
    assert getattr(setup.executor.plans[0], where) == value


async def test_fail_fast_stops_with_one_failure_more_than_is_allowed() -> None:
    setup = Setup(failing("agent", 9), tasks=10, concurrency=1, max_failures=2, fail_fast=True)
    await setup.play()
    assert setup.summary.failed == 3 and not setup.summary.complete
    assert setup.summary.stopped == "3 episodes failed, and 2 may (--fail-fast)"


async def test_without_fail_fast_all_is_played() -> None:
    setup = Setup(failing("agent", 9), tasks=10, concurrency=1, max_failures=2, max_failed_episodes=-1)
    await setup.play()
    assert setup.summary.failed == 10 and setup.summary.complete


async def test_a_run_stops_when_nothing_but_failures_of_the_server_come() -> None:
    setup = Setup(failing("server", 9), tasks=100, concurrency=1, retries=0, max_failed_episodes=-1)
    await setup.play()
    assert setup.summary.failed == 32
    assert str(setup.summary.stopped).endswith("(server): server failed")


async def test_one_good_episode_among_failures_of_workers_lets_a_run_go_on() -> None:
    setup = Setup(
        lambda plan: result_of(plan, None if plan.task.task_id == "t31" else "worker"),
        62,
        concurrency=1,
        retries=0,
        max_failed_episodes=-1,
    )
    await setup.play()
    assert setup.summary.complete and setup.summary.failed == 61


async def test_three_groups_worth_of_failed_episodes_in_a_row_stop_a_run_with_the_reasons(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setup = Setup(failing("agent", 9), tasks=10, group_size=2, concurrency=1)
    await setup.play()
    assert setup.summary.failed == 6 and not setup.summary.succeeded
    reasons = (
        "6 episodes in a row have failed (max_failed_episodes is 6): 6 x agent, such as task t0, sample 0, session"
    )
    assert str(setup.summary.stopped).startswith(reasons) and setup.summary.stopped in setup.summary.as_json().values()
    first, second, fourth = (record.getMessage() for record in caplog.records)
    assert first.startswith("an episode failed: agent: agent failed (task t0, sample 0, session t0-0")
    assert "2 times by now" in second and "4 times by now" in fourth


@pytest.mark.parametrize(("given", "played"), [({"max_failed_episodes": 4}, 4), ({"max_failures": 7}, 8)])
async def test_how_many_in_a_row_may_fail_is_an_option_and_as_many_as_are_no_error(
    given: dict[str, int], played: int
) -> None:
    setup = Setup(failing("agent", 9), tasks=10, concurrency=1, **given)
    await setup.play()
    assert (setup.summary.failed, setup.summary.complete) == (played, False)


async def test_one_good_episode_among_failed_ones_lets_a_run_go_on() -> None:
    setup = Setup(
        lambda plan: result_of(plan, None if plan.task.task_id in ("t2", "t5") else "agent"), 8, concurrency=1
    )
    await setup.play()
    assert setup.summary.complete and setup.summary.failed == 6


def test_no_number_of_failed_episodes_that_makes_no_sense_is_taken() -> None:
    for wrong, told in ((0, "at least 1, or -1"), (-2, "at least -1")):
        with pytest.raises(ConfigurationError, match=f"--max-failed-episodes must be {told}"):
            Setup(max_failed_episodes=wrong)


async def test_a_stop_cancels_what_plays_keeps_what_has_ended_and_begins_nothing(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    setup = Setup(tasks=5, concurrency=2, journal=journal)
    setup.executor.answer = lambda plan: (setup.executor.gate.clear(), result_of(plan))[1]
    playing = asyncio.create_task(setup.play())
    await until(lambda: len(setup.executor.plans) >= 3)
    setup.run.stop("enough")
    setup.run.stop("once more")
    await playing
    assert setup.executor.playing == 0
    assert setup.observer.told.count("stopping: enough") == 1 and "stopping: once more" not in setup.observer.told
    assert 1 <= setup.summary.done < 5 and len(setup.executor.plans) < 5
    journal.close()
    assert len(Journal(tmp_path / "j").entries) == setup.summary.done


async def test_what_an_earlier_start_played_is_counted_and_not_played_again() -> None:
    setup = Setup(failing("agent", 2), group_size=2, retry_on=("agent",), retries=3)
    done = Entry(Slot(0, "t0", 0), EpisodeResult("t0", 0, 0, "earlier", reward=1.0))
    begun = Entry(Slot(0, "t0", 1), EpisodeResult("t0", 1, 0, "gone", failure="agent"), again=True)
    setup.run.take_over([begun, done])
    await setup.play({Slot(0, "t0", 1): 1})
    assert [(plan.sample, plan.attempt) for plan in setup.executor.plans] == [(1, 1), (1, 2)]
    assert (setup.summary.done, setup.summary.earlier, setup.summary.retries) == (2, 1, {"agent": 2})


async def test_a_journal_that_cannot_be_written_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fdatasync", full)
    setup = Setup(tasks=9, journal=journal)
    with pytest.raises(ConfigurationError, match="the journal of the run cannot be written: No space left"):
        await setup.play()
    assert setup.executor.playing == 0 and setup.summary.done == 0
    journal.close()


async def test_an_executor_that_is_closed_leaves_its_episodes_to_the_next_start() -> None:
    setup = Setup(failing("cancelled", 9), tasks=2)
    await setup.play()
    assert (setup.summary.ended, setup.observer.told) == (0, [])
