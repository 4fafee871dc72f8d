"""Batches of whole groups from environments that play against a server, in threads and in processes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proxy.app import build_app
from proxy.settings import Settings
from tests.support import default_url, real_server, shared_renderer
from tests.unit.tokengrove.roll.roll_players import LENGTH, DropsFirst, OwnWorker, Player, path_of, settings
from tokengrove.client import Client, ServerUnreachable
from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import AgenticConfig
from tokengrove.roll.rock import reset_datasets
from tokengrove.roll.scheduler import RolloutScheduler, get_episode_scores, reduce_metrics
from tokengrove.roll.values import DataProto
from tokengrove.rollout.failures import WorkerDied

KEY = "the-admin-key"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("scheduler"), engine_arg=("tokens=8",), admin_key=KEY) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    with Client(url, KEY) as found:
        yield found


@pytest.fixture(autouse=True)
def _nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No thread of a scheduler runs on after a test."""
    monkeypatch.setenv("ROLL_PLAYERS", "to be set")
    before = set(threading.enumerate())
    Player.failed = False
    Player.released.clear()
    yield
    left = [
        thread
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith("tokengrove") and thread.name != "tokengrove-app"
    ]
    for thread in left:
        thread.join(60)
    assert not [thread.name for thread in left if thread.is_alive()]


def scheduler(client: Client, config: Any, mode: str = "train", **options: Any) -> RolloutScheduler:
    manager = config.train_env_manager if mode == "train" else config.val_env_manager
    return RolloutScheduler(config, manager, mode=mode, client=client, **options)


def at(step: int) -> DataProto:
    return DataProto(meta_info={"global_step": step})


def column(batch: DataProto | None, name: str) -> list[Any]:
    assert batch is not None
    return list(batch.non_tensor_batch[name])


def release_the_hanging() -> None:
    """Let environment 0 end its episode, and wait for that."""
    Player.released.set()
    for thread in threading.enumerate():
        if thread.name == "tokengrove-env-0":
            thread.join()


def check_tokens(client: Client, batch: DataProto) -> None:
    """Every row has the tokens, the mask and the logprobs of its session's export."""
    samples = {each.session_id: each for each in client.export(session_ids=batch.meta_info["session_ids"]).samples}
    assert len(samples) == len(batch)
    for row, name in enumerate(batch.meta_info["session_ids"]):
        sample, length = samples[name], len(samples[name].input_ids)
        assert batch.batch["input_ids"][row, :length].tolist() == sample.input_ids.tolist()
        assert batch.batch["response_mask"][row, :length].tolist() == sample.loss_mask.astype(bool).tolist()
        assert batch.batch["response_mask"][row].sum() == 8
        assert np.allclose(batch.batch["infer_logprobs"][row, : length - 1], sample.logprobs[1:])


def test_a_batch_has_whole_groups_with_one_seed_each_and_the_tokens_of_its_sessions(client: Client) -> None:
    config = settings(groups=2, size=2)
    with scheduler(client, config, seed=7) as train:
        first, second = train.get_batch(at(0), 4), train.get_batch(at(1), 4)
    for step, batch in enumerate([first, second]):
        assert batch is not None and batch.batch["input_ids"].shape == (4, LENGTH)
        assert sorted(column(batch, "env_ids")) == [0, 1, 2, 3]
        assert sorted(column(batch, "seed")) == [7 + step, 7 + step, 1007 + step, 1007 + step]
        assert column(batch, "start_step") == [step] * 4
        assert len(set(column(batch, "traj_group_id"))) == 2
        check_tokens(client, batch)
    assert first is not None and second is not None
    assert not set(first.meta_info["session_ids"]) & set(second.meta_info["session_ids"])
    assert first.meta_info["global_step"] == 0 and "session_id" not in first.meta_info
    assert first.meta_info["metrics"]["env/length"] == [8] * 4
    assert reduce_metrics(first.meta_info["metrics"])["env/id_max"] == 3.0
    assert first.meta_info["metrics"]["scheduler/group_filter_count"] == 0


def plan_of(client: Client, config: AgenticConfig) -> list[tuple[Any, ...]]:
    """What a batch played: environment, seed of the episode, and seed and tokens of its answers."""
    with scheduler(client, config) as train:
        batch = train.get_batch(at(0), 4)
    assert batch is not None
    samples = {each.session_id: each for each in client.export(session_ids=batch.meta_info["session_ids"]).samples}
    played = [samples[name] for name in batch.meta_info["session_ids"]]
    answers = [(sample.turns[0]["sampling"]["seed"], sample.input_ids.tolist()) for sample in played]
    return sorted(zip(column(batch, "env_ids"), column(batch, "seed"), *zip(*answers, strict=True), strict=True))


def test_two_runs_of_a_yaml_with_a_seed_have_one_plan_and_others_have_others(client: Client) -> None:
    def config(**given: Any) -> AgenticConfig:
        environment = {"env_type": "none", "env_manager_cls": path_of(Player), "max_tokens_per_step": 8}
        return AgenticConfig(
            rollout_batch_size=4,
            sequence_length=LENGTH,
            train_env_manager={"num_env_groups": 2, "group_size": 2, "tags": ["Plays"]},
            custom_envs={"Plays": environment},
            actor_infer={"generating_args": {"max_new_tokens": 8}},
            **given,
        )

    first = plan_of(client, config(seed=3))
    assert first == plan_of(client, config(seed=3))
    assert len({seed for _, seed, _, _ in first}) == 2 and len({seed for _, _, seed, _ in first}) == 4
    assert {seed for _, seed, _, _ in first}.isdisjoint(seed for _, seed, _, _ in plan_of(client, config(seed=4)))


@pytest.mark.parametrize(("config", "base"), [({"seed": 3}, 3), ({}, None), ({"seed": None}, None)])
def test_only_a_seed_that_is_given_is_the_base_of_training(
    client: Client, config: dict[str, Any], base: int | None
) -> None:
    def base_of(**options: Any) -> int:
        made = scheduler(client, AgenticConfig(sequence_length=LENGTH, **config), **options)
        made.shutdown()
        return made._base_seed()

    found = {base_of() for _ in range(4)}
    assert found == {base} if base is not None else len(found) > 1
    assert base_of(mode="val") == (base or 42)
    assert base_of(seed=9) == 9


def test_a_batch_of_one_episode_names_its_session_too(client: Client) -> None:
    with scheduler(client, settings(groups=1, size=1)) as train:
        batch = train.get_batch(at(0), 1)
    assert batch is not None and len(batch.meta_info["session_ids"]) == 1 and "session_id" not in batch.meta_info
    check_tokens(client, batch)


def test_no_claim_gets_a_session_and_one_that_is_dropped_is_withdrawn(client: Client) -> None:
    config = settings(groups=1, size=2, redundancy=1, group_filter=DropsFirst, rollout_batch_size=2)
    before = {each["session_id"] for each in client.sessions()}
    client.claim(limit=1000)
    with scheduler(client, config) as train:
        batch = train.get_batch(at(0), 2)
        assert batch is not None and batch.meta_info["metrics"]["scheduler/group_filter_count"] == 1
        names = column(batch, "traj_group_id")
        assert len(set(names)) == 1 and "_0_1_" in names[0]  # the episode 0 was filtered, 1 played in its place
        given = set(batch.meta_info["session_ids"])
    played = [each for each in client.sessions() if each["session_id"] not in before]
    assert all(each["status"] == "ended" and each["delivery"] == "runner" for each in played)
    dropped = [each for each in played if each["outcome"] == "Finished" and each["session_id"] not in given]
    assert len([each for each in dropped if "_0_0_" in each["group_id"]]) >= 2
    assert [each["withdrawn"] for each in dropped] == [True] * len(dropped)
    assert not any(each["withdrawn"] for each in played if each["session_id"] in given)
    assert client.claim(limit=1000, filter={"outcome": "Finished"}).sessions == {}


def test_redundant_environments_play_and_only_group_size_results_count(client: Client) -> None:
    config = settings(groups=2, size=2, redundancy=1)
    with scheduler(client, config) as train:
        for step in range(2):
            batch = train.get_batch(at(step), 4)
            assert batch is not None and len(batch) == 4
            groups = column(batch, "traj_group_id")
            assert sorted(groups.count(name) for name in set(groups)) == [2, 2]


def test_training_and_validation_run_side_by_side(client: Client) -> None:
    config = settings(groups=1, size=2)
    client.claim(limit=1000)
    with scheduler(client, config) as train, scheduler(client, config, "val") as val:
        trained = train.get_batch(at(0), 2)
        validated = [val.get_batch(at(step), 2) for step in (0, 0)]
    assert trained is not None and len(trained) == 2
    assert [column(batch, "seed") for batch in validated] == [[42, 42], [43, 43]]
    for batch in validated:
        assert batch is not None
        found = client.sessions({"metadata": {"validate": True, "mode": "val"}})
        assert set(batch.meta_info["session_ids"]) <= {each["session_id"] for each in found}


def test_a_negative_batch_size_takes_all_until_the_data_end_and_then_begins_anew(client: Client) -> None:
    config = settings(groups=2, size=2, val_batch_size=-1, env={"data": 2})
    with scheduler(client, config, "val") as val:
        for step in range(2):
            batch = val.get_batch(at(step), -1)
            assert sorted(column(batch, "seed")) == [42, 42, 43, 43, 1042, 1042, 1043, 1043]


def test_a_batch_after_the_end_of_the_data_is_none(client: Client) -> None:
    with scheduler(client, settings(groups=1, size=2, env={"data": 1})) as train:
        assert train.get_batch(at(0), 2) is not None
        assert train.get_batch(at(1), 2) is None
        assert train.get_batch(at(2), 2) is None


def test_an_environment_that_fails_begins_anew(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with scheduler(client, settings(groups=1, size=2, env={"then": "raise"})) as train:
        batch = train.get_batch(at(0), 2)
    assert batch is not None
    check_tokens(client, batch)
    assert "failed and is restarted" in caplog.text


def test_an_environment_that_always_fails_ends_the_run_with_its_error(client: Client) -> None:
    with scheduler(client, settings(groups=1, size=1, env={"then": "raise always"})) as train:
        with pytest.raises(ZeroDivisionError, match="always fails") as caught:
            train.get_batch(at(0), 1)
        assert caught.value.__notes__ == ["environment 0 has failed 3 times in a row without a result"]


def test_suspend_pauses_the_engine_until_the_next_batch_or_the_shutdown(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with scheduler(client, settings(groups=1, size=1, async_generation_ratio=1)) as train:
        assert train.get_batch(at(0), 1) is not None
        train.suspend()
        assert client.engine().paused is not None
        assert train.get_batch(at(1), 1) is not None
        assert client.engine().paused is None
        train.suspend()
    assert client.engine().paused is None  # nobody is left who would let it go on
    assert "still playing" not in caplog.text  # what waited for the engine has ended


def test_what_makes_no_sense_is_refused(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    config = settings(groups=1, size=1)
    with pytest.raises(InvalidRequest, match="'train' or 'val'"):
        RolloutScheduler(config, config.train_env_manager, mode="test", client=client)
    with pytest.raises(InvalidRequest, match="the configuration has no val_env_manager"):
        RolloutScheduler(config, None, mode="val", client=client)
    with (
        pytest.raises(ServerUnreachable, match="has to begin with http"),
        RolloutScheduler(config, config.train_env_manager, url="127.0.0.1:8080") as unreachable,
    ):
        unreachable.get_batch(at(0), 1)
    assert "trying again" not in caplog.text
    with caplog.at_level(logging.INFO):
        train = RolloutScheduler(config, config.train_env_manager, object(), object(), client=client)
    assert "the server runs the engine" in caplog.text
    with pytest.raises(InvalidRequest, match="batch_size is 0"):
        train.get_batch(at(0), 0)
    train.shutdown()
    with pytest.raises(RuntimeError, match="was shut down"):
        train.get_batch(at(0), 1)


def test_shutdown_ends_a_batch_that_another_thread_waits_for(client: Client) -> None:
    train = scheduler(client, settings(groups=1, size=1, env={"then": "hang"}))
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(train.get_batch(at(0), 1)))
    waiting.start()
    while not client.sessions({"status": "active"}):
        pass  # until the environment plays
    train.shutdown(timeout_s=0.0)
    waiting.join()
    assert found == [None]
    release_the_hanging()


@pytest.mark.wide
def test_workers_are_processes_of_their_own_and_a_killed_one_is_started_again(
    client: Client, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told = tmp_path / "pid"
    config = settings(groups=2, size=2, workers=4, worker=OwnWorker, env={"then": "kill", "told": str(told)})
    with scheduler(client, config, seed=3, processes=2) as train:
        batches = [train.get_batch(at(step), 4) for step in range(2)]
    for step, batch in enumerate(batches):
        assert batch is not None
        check_tokens(client, batch)
        assert sorted(column(batch, "seed")) == [3 + step, 3 + step, 1003 + step, 1003 + step]
        assert column(batch, "start_step") == [step] * 4
        pids = set(column(batch, "pid"))
        assert len(pids) == 2 and os.getpid() not in pids and int(told.read_text()) not in pids
    assert "died and is restarted" in caplog.text
    assert client.sessions({"status": "active"}) == []
    failed = client.sessions({"outcome": "Failed", "metadata": {"exp_name": "players"}})
    assert any("SIGKILL" in str(each["exit_reason"]) for each in failed)


@pytest.mark.wide
def test_worker_processes_go_through_a_data_set_together(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f'{{"name": "task-{number}"}}\n' for number in range(3)))
    config = settings(groups=2, size=1, workers=2, env={"tasks": str(path)})
    with scheduler(client, config, "val", processes=2) as val:
        assert sorted(column(val.get_batch(at(0), 2), "task")) == ["task-0", "task-1"]
        reset_datasets("val")
        assert sorted(column(val.get_batch(at(1), 2), "task")) == ["task-0", "task-1"]
        assert column(val.get_batch(at(2), 2), "task") == ["task-2"]  # only one of the two has data
        assert val.get_batch(at(3), 2) is None


@pytest.mark.wide
def test_a_worker_that_always_dies_ends_the_run(client: Client) -> None:
    config = settings(groups=2, size=1, workers=2, env={"then": "kill always"})
    with scheduler(client, config, processes=2) as train:
        with pytest.raises(WorkerDied, match="SIGKILL") as caught:
            train.get_batch(at(0), 2)
        assert "has died 3 times in a row" in caught.value.__notes__[0]
    assert client.sessions({"status": "active"}) == []


def test_several_workers_may_be_threads(client: Client) -> None:
    config = settings(groups=2, size=1, workers=2)
    with scheduler(client, config, processes=0) as train:
        batch = train.get_batch(at(0), 2)
    assert set(column(batch, "pid")) == {os.getpid()}
    assert batch is not None and sorted(get_episode_scores(batch)) == [0.0, 1.0]


def test_a_thread_that_hangs_is_named_at_the_shutdown(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    train = scheduler(client, settings(groups=2, size=1, env={"then": "hang"}))
    assert column(train.get_batch(at(0), 1), "env_ids") == [1]
    train.shutdown(timeout_s=0.5)
    assert "train: still playing after 0.5 s: tokengrove-env-0" in caplog.text
    release_the_hanging()


def test_a_process_that_hangs_is_killed_at_the_shutdown(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    train = scheduler(client, settings(groups=2, size=1, workers=2, env={"then": "hang"}), processes=2)
    batch = train.get_batch(at(0), 1)
    assert column(batch, "env_ids") == [1]
    while not client.sessions({"status": "active"}):
        pass  # until environment 0 plays
    train.shutdown(timeout_s=0.0)
    assert "train: still playing after 0 s: the process of worker 0" in caplog.text
    assert client.sessions({"status": "active"}) == []


def test_an_app_of_this_process_is_played_in_threads(tmp_path: Path) -> None:
    settings_of_app = Settings(engine="scripted", engine_arg=("tokens=8",), database_url=default_url(tmp_path))
    config = settings(groups=2, size=1, workers=2)
    with shared_renderer(settings_of_app):
        app = build_app(settings_of_app)
        with RolloutScheduler(config, config.train_env_manager, app=app) as train:
            assert set(column(train.get_batch(at(0), 2), "pid")) == {os.getpid()}
    assert os.environ["ROLL_PLAYERS"] == "set"  # system_envs


SCRIPT = """
import signal

from tokengrove.roll import DataProto, RolloutScheduler
from tests.unit.tokengrove.roll.roll_players import settings

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it in what it runs in the background
config = settings(groups=2, size=1, workers=2)
with RolloutScheduler(config, config.train_env_manager, url={url!r}, admin_key={key!r}, processes=2) as train:
    for step in range(10**9):
        batch = train.get_batch(DataProto(meta_info={{"global_step": step}}), 2)
        print(*batch.non_tensor_batch["pid"], flush=True)
"""


@pytest.mark.wide
def test_an_interrupted_program_ends_its_workers(url: str, client: Client) -> None:
    command = [sys.executable, "-c", SCRIPT.format(url=url, key=KEY)]
    program = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    pids = program.stdout.readline().split()
    assert len(pids) == 2
    program.send_signal(signal.SIGINT)
    _, told = program.communicate()
    assert told.splitlines()[-1] == "KeyboardInterrupt", told
    assert not [pid for pid in pids if Path("/proc", pid).exists()]
    assert client.sessions({"status": "active"}) == []
