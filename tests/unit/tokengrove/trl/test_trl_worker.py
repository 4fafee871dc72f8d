"""TRL's worker: groups of episodes become rows, none is waited for in vain, and nothing is left when it stops."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support import real_server
from tests.unit.tokengrove.trl import trl_players
from tokengrove.client import Client
from tokengrove.client.adapters import trl
from tokengrove.client.options import SessionOptions
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.episodes import Task
from tokengrove.rollout.executors import ExecutorOptions
from tokengrove.trl import AgentWorker

ROWS = [{"id": "oak"}, {"id": "ash"}]
WAIT_S = 60.0


@dataclass
class Row:
    """TRL's `RolloutSample`, which is not installed here."""

    prompt: Any
    completion: Any
    input_ids: Any
    completion_mask: Any
    old_log_probs: Any
    advantage: float
    model_version: int
    group_id: int
    metrics: dict[str, float]
    enqueued_at: float | None = None


@pytest.fixture(autouse=True)
def without_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trl, "library", lambda name: SimpleNamespace(RolloutSample=Row))
    trl_players.begun.clear()
    trl_players.tried.clear()
    trl_players.released.clear()
    monkeypatch.setattr(trl_players, "started", threading.Semaphore(0))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("worker")) as url:
        yield url


class Workers:
    """Makes workers of one server, and stops them."""

    def __init__(self, url: str) -> None:
        self.url, self._made = url, list[AgentWorker]()

    def __call__(self, agent: Any = trl_players.numbered, rows: Any = ROWS, **options: Any) -> AgentWorker:
        given = {"group_size": 3, "at_once": 3, **options}
        self._made.append(AgentWorker(given.pop("url", self.url), agent=agent, dataset=rows, **given))
        return self._made[-1]

    def stop(self) -> None:
        trl_players.released.set()
        for worker in self._made:
            worker.stop()


@pytest.fixture
def make(url: str) -> Iterator[Workers]:
    workers = Workers(url)
    yield workers
    workers.stop()


def taken(worker: AgentWorker, count: int) -> list[Row]:
    return [worker.rollout_buffer.get(timeout=WAIT_S) for _ in range(count)]


def failure(worker: AgentWorker) -> str:
    """What `check_health` raises once the worker has ended."""
    assert worker._running is not None
    with pytest.raises(BaseException):  # noqa: B017 - what ended it is read below
        worker._running.result(WAIT_S)
    with pytest.raises(RuntimeError) as raised:
        worker.check_health(WAIT_S)
    return str(raised.value)


def test_groups_come_whole_with_advantages_and_no_claim_gets_their_sessions(url: str, make: Workers) -> None:
    worker = make(buffer_size=3)
    worker.start()
    rows = taken(worker, 9)
    worker.check_health(WAIT_S)
    worker.stop()
    groups = rows[:3], rows[3:6], rows[6:]
    assert [len({row.group_id for row in group}) for group in groups] == [1, 1, 1]
    assert len({row.group_id for row in rows}) == 3
    for group in groups:
        by_reward = {row.metrics["reward"]: row.advantage for row in group}
        assert by_reward == {0.0: pytest.approx(-1.2247, abs=1e-3), 1.0: 0.0, 2.0: pytest.approx(1.2247, abs=1e-3)}
    for row in rows:
        assert row.completion_mask.sum() == 4 and len(row.old_log_probs) == len(row.input_ids)
        assert [message["role"] for message in row.prompt + row.completion] == ["user", "assistant"]
        assert row.enqueued_at is not None
    with Client(url) as client:
        numbers = {row.group_id for row in rows}
        names = {worker._groups.planner(number, {})(0, 0, True).options["group_id"] for number in numbers}
        read = [entry for entry in client.sessions() if entry["group_id"] in names]
        assert len(read) == 9 and {entry["outcome"] for entry in read} == {"Finished"}
        assert {entry["task_id"] for entry in read} == {"oak", "ash"}
        assert {entry["group_size"] for entry in read} == {3}
        assert not names & {entry["group_id"] for entry in client.claim(limit=1000).sessions.values()}


def test_an_episode_that_fails_is_not_compared_and_gives_no_row(make: Workers) -> None:
    worker = make(rows=[{"fails": [2]}], buffer_size=2)
    worker.start()
    rows = taken(worker, 4)
    assert rows[0].group_id == rows[1].group_id != rows[2].group_id == rows[3].group_id
    assert sorted(row.advantage for row in rows[:2]) == pytest.approx([-1.0, 1.0])
    metrics = worker.metrics_queue.get(timeout=WAIT_S)
    assert metrics["rollout/failed_agent_total"] == metrics["rollout/failed_episodes_total"] == 1.0
    assert metrics["rollout/turns_mean"] == (3.0, 3.0)


def test_an_episode_that_fails_is_played_again_and_its_session_is_withdrawn(url: str, make: Workers) -> None:
    worker = make(trl_players.flaky, group_size=1, at_once=1, retries=1)
    worker.start()
    taken(worker, 1)
    worker.stop()
    with Client(url) as client:
        withdrawn = {entry["session_id"]: entry["withdrawn"] for entry in client.sessions()}
    assert (withdrawn[trl_players.begun[0]], withdrawn[trl_players.tried[0]]) == (False, True)
    assert not any("failed" in name for name in worker.metrics_queue.get(timeout=WAIT_S))


def test_no_more_groups_are_begun_than_the_buffer_and_those_that_play_have_room_for(make: Workers) -> None:
    worker = make(buffer_size=1)
    worker.start()
    for count in range(1, 16):
        taken(worker, 1)
        # Rows that were taken, one on the buffer, and two groups that play or wait for room.
        assert len(trl_players.begun) <= 3 * (-(-(count + 1) // 3) + 2)


def test_rows_that_are_too_old_are_dropped_and_counted(make: Workers) -> None:
    worker = make(max_staleness=2)
    worker.update_model_version(3)
    worker.start()
    metrics = worker.metrics_queue.get(timeout=WAIT_S)
    assert metrics["rollout/dropped_stale_total"] == 3.0
    assert worker.rollout_buffer.empty()
    worker.update_model_version(2)
    assert taken(worker, 1)[0].model_version == 0


def test_a_reward_function_rewards_by_its_path_or_itself(make: Workers) -> None:
    for reward in (trl_players.said, "tests.unit.tokengrove.trl.trl_players:said"):
        worker = make(trl_players.cool, reward=reward, group_size=1)
        worker.start()
        (row,) = taken(worker, 1)
        assert row.metrics["reward"] == len(row.completion[0]["content"])


def test_a_row_may_be_a_task_with_options_of_its_own(url: str, make: Workers) -> None:
    task = Task("one-turn", {}, {"limits": {"max_turns": 1}, "metadata": {"level": "hard"}})
    options: SessionOptions = {"limits": {"max_total_tokens": 99}, "sampling": {"temperature": 0.5}}
    worker = make(rows=[task], group_size=1, at_once=1, options=options)
    worker.start()
    taken(worker, 1)
    with Client(url) as client:
        shown = client.session_tree(trl_players.begun[0])
        turn = client.show_turn(shown.session_id, 0, ["messages"])
    assert (shown.task_id, shown.extra["metadata"]["level"]) == ("one-turn", "hard")
    assert turn["sampling"]["temperature"] == 0.5
    assert worker._groups.planner(0, task)(0, 0, True).options["limits"] == {"max_total_tokens": 99, "max_turns": 1}


def test_the_trainers_sampling_wins_over_the_agents(url: str, make: Workers) -> None:
    worker = make(trl_players.cool, group_size=1, at_once=1, sampling={"temperature": 0.6})
    worker.start()
    taken(worker, 1)
    with Client(url) as client:
        played = client.sessions({"group_id": worker._groups.planner(0, ROWS[0])(0, 0, True).options["group_id"]})
        turn = client.show_turn(played[0]["session_id"], 0, ["messages"])
    assert turn["sampling"]["temperature"] == 0.6 and turn["sampling"].get("top_p", 1.0) == 1.0


def test_episodes_may_run_in_other_processes(make: Workers) -> None:
    worker = make(trl_players.cool, executor=ExecutorOptions("process", concurrency=2, workers=1), group_size=2)
    worker.start()
    assert len({row.group_id for row in taken(worker, 2)}) == 1


def test_a_server_that_is_gone_is_reported(make: Workers) -> None:
    worker = make(url="http://127.0.0.1:9", start_timeout_s=0.0)
    worker.start()
    assert "127.0.0.1:9: the server is lost" in failure(worker)


@pytest.mark.parametrize(("options", "most"), [({}, 9), ({"max_failed_episodes": 4}, 4)])
def test_an_agent_that_always_fails_is_reported_with_what_it_raised(
    make: Workers, caplog: pytest.LogCaptureFixture, options: dict[str, int], most: int
) -> None:
    worker = make(rows=[{"fails": [0, 1, 2]}], **options)
    worker.start()
    assert f"{most} episodes in a row have failed" in (told := failure(worker))
    assert f"{most} x ValueError, such as task" in told and "has failed" in told
    assert "an episode failed: ValueError: sample" in caplog.text and "Traceback" in caplog.text
    assert worker.rollout_buffer.empty()


@pytest.mark.parametrize(("rows", "why"), [([], "has no row"), (iter([{"id": "once"}]), "has no more rows")])
def test_a_dataset_that_cannot_be_repeated_is_reported(make: Workers, rows: Any, why: str) -> None:
    worker = make(rows=rows)
    worker.start()
    assert why in failure(worker)


def test_a_blocked_event_loop_is_reported(make: Workers) -> None:
    worker = make(trl_players.blocks, group_size=1, at_once=1)
    worker.start()
    assert trl_players.started.acquire(timeout=WAIT_S)
    with pytest.raises(RuntimeError, match="have not responded"):
        worker.check_health(0.05)
    trl_players.released.set()
    taken(worker, 1)
    worker.check_health(WAIT_S)


def test_stopping_ends_the_episodes_that_run_and_leaves_no_thread(url: str, make: Workers) -> None:
    worker = make(trl_players.waits)
    worker.start()
    worker.start()
    assert all(trl_players.started.acquire(timeout=WAIT_S) for _ in range(3))
    worker.stop()
    worker.stop()
    worker.check_health(WAIT_S)
    with Client(url) as client:
        for session_id in trl_players.begun:
            tree = client.session_tree(session_id)
            assert (tree.status, tree.outcome) == ("ended", "Failed")
    assert worker._loop._thread is not None and not worker._loop._thread.is_alive()
    with pytest.raises(queue.Empty):
        worker.rollout_buffer.get_nowait()


def test_stopping_while_sessions_start_leaves_none_of_them(url: str, make: Workers) -> None:
    for _ in range(5):
        worker = make(group_size=12, at_once=12)
        worker.start()
        assert trl_players.started.acquire(timeout=WAIT_S)
        worker.stop()
        with Client(url) as client:
            assert client.sessions({"status": "active"}) == []


def test_a_worker_that_was_never_started_stops_and_is_healthy(make: Workers) -> None:
    worker = make()
    worker.check_health(0.0)
    worker.stop()


@pytest.mark.parametrize("agent", [lambda data: 0.0, str.upper, object()])
def test_an_agent_without_a_path_is_refused_at_once(make: Workers, agent: Any, tmp_path: Path) -> None:
    with pytest.raises((InvalidRequest, TypeError)):
        make(agent)


def test_a_group_without_sessions_is_refused(make: Workers) -> None:
    with pytest.raises(InvalidRequest, match="group_size is 0"):
        make(group_size=0)


def test_fewer_than_no_retries_are_refused(make: Workers) -> None:
    with pytest.raises(InvalidRequest, match="'retries' must be at least 0, not -1"):
        make(retries=-1)
