"""A run of ROLL in which every episode fails: it warns, its batches count, and it ends with the reasons."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import real_server
from tests.unit.tokengrove.roll.roll_failing import Hangs
from tests.wide import CROSSED
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.roll import AgenticConfig, AgenticRolloutPipeline, DataProto, RolloutScheduler
from tokengrove.rollout.failure_log import TooManyFailedEpisodes

MANAGERS = "roll.pipeline.agentic.env_manager"
FAILING = "tests.unit.tokengrove.roll.roll_failing"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with real_server(tmp_path_factory.mktemp("failing"), engine_arg=("play=agent",)) as url, Client(url) as client:
        yield client


def config(env: dict[str, Any], groups: int = 1, size: int = 2, **more: Any) -> AgenticConfig:
    values = {
        "exp_name": "failing",
        "sequence_length": 256,
        "rollout_batch_size": groups * size,
        "max_steps": 8,
        "eval_steps": 0,
        "actor_infer": {"generating_args": {"max_new_tokens": 8, "temperature": 1.0}},
        "train_env_manager": {"num_env_groups": groups, "group_size": size, "tags": ["T"]},
        "custom_envs": {"T": {"env_type": f"{FAILING}.Broken", "max_tokens_per_step": 8, "max_steps": 2, **env}},
    }
    return AgenticConfig({**values, **more})


def runner(name: str, **env: Any) -> dict[str, Any]:
    path = name if "." in name else f"{FAILING}.{name}"
    return {"env_manager_cls": f"{MANAGERS}.proxy_env_manager.ProxyEnvManager", "agent_runner_cls": path, **env}


def batches(client: Client, config: AgenticConfig, **options: Any) -> Iterator[DataProto]:
    for step in AgenticRolloutPipeline(config, client=client, seed=0, **options).steps():
        yield step.batch


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if "an episode failed" in each.getMessage()]


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "ReturnsDict",
            "InvalidResult: run_job returned dict {'status': 'Finished', 'score': 1.0}; it must return an "
            "EpisodeResult, whose status is one of Finished, Failed, NoData, Timeout",
        ),
        ("ReturnsNothing", "InvalidResult: run_job returned NoneType None"),
        (
            "Misspells",
            "InvalidResult: run_job returned the status 'Fnished', which is none of Finished, Failed, NoData, Timeout; "
            "did you mean Finished?",
        ),
        ("Raises", "KeyError: 'instance_id'"),
        ("Exits", "SystemExit: 1"),
        ("Cancelled", "CancelledError"),
        ("SaysFailed", "Failed: the sandbox is gone"),
        ("Silent", "NoTurns: the episode has no turn"),
        ("TooLate", "EpisodeTimeout: the episode has run for longer"),
        ("NoNumber", "InvalidResult: run_job returned a score that is not a finite number"),
        ("RefusedRequest", "RequestError: 400"),
    ],
)
def test_a_runner_that_always_fails_is_a_warning_and_ends_the_run(
    client: Client, caplog: pytest.LogCaptureFixture, name: str, told: str
) -> None:
    got = []
    with pytest.raises(
        TooManyFailedEpisodes, match=r"^6 episodes in a row have failed \(max_failed_episodes is 6\)"
    ) as e:
        got.extend(batches(client, config(runner(name))))
    assert [batch.meta_info["failed_episodes"] for batch in got] == [2, 2]
    kind, _, message = told.partition(": ")
    assert f"6 x {kind}, such as task T_0_0_" in str(e.value) and message.split(", and must")[0] in str(e.value)
    first, *counts = warnings(caplog)
    assert first.startswith(f"train: an episode failed: {told}") and "(task T_0_0_" in first and "session T_0" in first
    assert len(counts) == 2 and "4 times by now" in counts[-1]
    assert ("Traceback" in first) is (name in ("Raises", "Exits", "Cancelled", "TooLate", "RefusedRequest"))


def rock(folder: Path, command: str) -> dict[str, Any]:
    tasks = folder / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"n": number}) + "\n" for number in range(8)))
    job = {"agents": [{"command": command}]}
    return runner("roll.pipeline.agentic.agent_runner.rock.PushModeRunner") | {
        "agent_runner_cls": "tokengrove.roll.PushModeRunner",
        "env_config": {"dataset_name": str(tasks), "job_config": job},
    }


@pytest.mark.parametrize(
    ("command", "told"), [("echo oh no; exit 1", "Failed: the agent exited with 1: oh no"), ("true", "NoTurns: ")]
)
def test_an_agent_of_rock_that_exits_with_1_or_never_calls_ends_the_run(
    client: Client, caplog: pytest.LogCaptureFixture, tmp_path: Path, command: str, told: str
) -> None:
    with pytest.raises(TooManyFailedEpisodes, match=told.split(":")[0]):
        list(batches(client, config(rock(tmp_path, command)), max_failed_episodes=2))
    assert f"an episode failed: {told}" in warnings(caplog)[0]


def test_a_setup_that_fails_is_a_warning_and_ends_the_run(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(OSError, match="there is no image") as caught:
        list(batches(client, config(runner("NoSetup"), size=1)))
    assert "environment 0 failed and is restarted: OSError: there is no image" in caplog.text
    assert caught.value.__notes__ == ["environment 0 has failed 3 times in a row without a result"]


def test_a_runner_that_hangs_is_a_timeout_and_ends_the_run(
    client: Client, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokengrove.roll.managers.proxy_env_manager._GRACE_S", 0.0)
    monkeypatch.setattr(Hangs, "released", threading.Event(), raising=False)
    try:
        with pytest.raises(TooManyFailedEpisodes, match="1 x Timeout"):
            env = runner("Hangs", env_config={"episode_timeout": 0.1})
            list(batches(client, config(env, size=1), max_failed_episodes=1))
    finally:
        Hangs.released.set()
    assert "Timeout: run_job took longer than 0.1 s" in warnings(caplog)[0]


@pytest.mark.parametrize(
    ("manager", "template"),
    [
        ("traj_env_manager.TrajEnvManager", "{observation}"),
        ("step_env_manager.StepEnvManager", "{current_observation}"),
    ],
)
def test_an_environment_of_a_direct_manager_that_always_fails_ends_the_run(
    client: Client, caplog: pytest.LogCaptureFixture, manager: str, template: str
) -> None:
    pytest.importorskip("gem")
    env = {
        "env_type": f"{FAILING}.Broken",
        "env_manager_cls": f"{MANAGERS}.{manager}",
        "agent_template": template,
        "env_config": {},
    }
    with pytest.raises(TooManyFailedEpisodes, match="2 x ArithmeticError"):
        list(batches(client, config(env, size=1), max_failed_episodes=2))
    assert "an episode failed: ArithmeticError: the board is gone (task T_0_0_" in warnings(caplog)[0]


@CROSSED
@pytest.mark.parametrize("reward", [None, float("nan"), 1e300, "much", [1.0]])
@pytest.mark.parametrize(
    ("manager", "template"),
    [
        ("traj_env_manager.TrajEnvManager", "{observation}"),
        ("step_env_manager.StepEnvManager", "{current_observation}"),
    ],
)
def test_a_step_whose_reward_is_no_number_fails_its_episode_and_no_batch_has_it(
    client: Client, caplog: pytest.LogCaptureFixture, manager: str, template: str, reward: Any
) -> None:
    pytest.importorskip("gem")
    env = {
        "env_type": f"{FAILING}.Unpaid",
        "env_manager_cls": f"{MANAGERS}.{manager}",
        "agent_template": template,
        "env_config": {"reward": reward},
    }
    found = []
    with pytest.raises(TooManyFailedEpisodes, match="2 x InvalidResult"):
        found.extend(batches(client, config(env, size=1), max_failed_episodes=2))
    assert [batch.meta_info["failed_episodes"] for batch in found] == [1]
    assert [float(batch.batch["scores"].sum()) for batch in found] == [0.0]
    assert f"the environment's step returned the reward {reward!r}" in warnings(caplog)[0]


def test_one_success_begins_the_count_anew_and_each_batch_counts(client: Client) -> None:
    found = list(batches(client, config(runner("FailsAtFirst"), size=1), max_failed_episodes=3))
    counts = [batch.meta_info["failed_episodes"] for batch in found]
    assert len(counts) == 8 and set(counts) == {0, 1} and sum(counts) > 3
    for batch in found:
        assert batch.meta_info["metrics"]["scheduler/failed_episodes"] == batch.meta_info["failed_episodes"]
        assert [each["type"] for each in batch.meta_info["failed"]] == ["ValueError"] * len(batch.meta_info["failed"])
        assert {each["session"] for each in batch.meta_info["failed"]} <= set(batch.meta_info["session_ids"])


def test_a_run_may_go_on_however_many_episodes_fail(client: Client) -> None:
    found = list(batches(client, config(runner("Raises"), size=1, max_failed_episodes=-1)))
    assert [batch.meta_info["failed_episodes"] for batch in found] == [1] * 8


def test_the_yaml_says_how_many_may_fail_and_a_keyword_wins(client: Client) -> None:
    given = config(runner("Raises"), size=1, max_failed_episodes=5)
    for options, most in (({}, 5), ({"max_failed_episodes": 2}, 2)):
        with pytest.raises(TooManyFailedEpisodes, match=f"max_failed_episodes is {most}"):
            list(batches(client, given, **options))


@pytest.mark.parametrize("wrong", [0, -3])
def test_a_number_that_makes_no_sense_is_refused_by_name(client: Client, wrong: int) -> None:
    with pytest.raises(InvalidRequest, match="max_failed_episodes is"):
        config(runner("Raises"), max_failed_episodes=wrong)
    given = config(runner("Raises"))
    with pytest.raises(InvalidRequest, match="max_failed_episodes is"):
        RolloutScheduler(given, given.train_env_manager, client=client, max_failed_episodes=wrong)


def test_failed_episodes_of_workers_in_other_processes_are_counted_here(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    given = config(runner("Raises"), groups=2, size=2)
    given.train_env_manager.max_env_num_per_worker = 2
    with pytest.raises(TooManyFailedEpisodes, match="6 x KeyError"):
        list(batches(client, given, processes=2))
    assert "Traceback" in warnings(caplog)[0]
