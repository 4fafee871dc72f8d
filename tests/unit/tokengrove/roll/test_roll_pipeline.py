"""A run as ROLL's users configure it, on gem's games: batches, validations, and what is written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.support import real_server
from tests.unit.tokengrove.roll.roll_players import settings
from tokengrove.client import Client
from tokengrove.errors import InvalidRequest
from tokengrove.roll import AgenticConfig, AgenticRolloutPipeline, DataProto, RolloutScheduler
from tokengrove.roll.scheduler import dump_rollout_trajectories, get_episode_scores, reduce_metrics

KEY = "the-admin-key"
YAML = """
exp_name: guessing
seed: 42
sequence_length: 1024
rollout_batch_size: 4
val_batch_size: 4
max_steps: 2
eval_steps: 2
rollout_dump_dir: {dump}
pretrain: Qwen/Qwen2.5-0.5B-Instruct
actor_infer:
  generating_args:
    max_new_tokens: 16
    temperature: 0.99
train_env_manager:
  max_env_num_per_worker: {each}
  num_env_groups: 2
  group_size: 2
  group_size_redundancy: 1
  group_filter_cls: tests.unit.tokengrove.roll.roll_players.DropsFirst
  tags: [Guess, Mastermind]
  num_groups_partition: [1, 1]
val_env_manager:
  max_env_num_per_worker: 4
  num_env_groups: 4
  group_size: 1
  tags: [Guess, Mastermind]
  num_groups_partition: [2, 2]
max_tokens_per_step: 8
env_manager_cls: roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager
agent_runner_cls: roll.pipeline.agentic.agent_runner.gem_runner.GEMRunner
custom_env:
  Guess:
    env_type: game:GuessTheNumber-v0
    max_steps: 3
    max_tokens_per_step: ${{max_tokens_per_step}}
    env_manager_cls: ${{env_manager_cls}}
    agent_runner_cls: ${{agent_runner_cls}}
    agent_system_template: You play games.
    agent_template: "{{observation}}"
    env_config:
      min_number: 1
      max_number: 20
      max_turns: 3
  Mastermind:
    env_type: game:Mastermind-v0
    max_steps: 2
    max_tokens_per_step: ${{max_tokens_per_step}}
    env_manager_cls: ${{env_manager_cls}}
    agent_runner_cls: ${{agent_runner_cls}}
    agent_system_template: You play games.
    agent_template: "{{observation}}"
    env_config:
      max_turns: 2
custom_envs:
  Guess:
    ${{custom_env.Guess}}
  Mastermind:
    ${{custom_env.Mastermind}}
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with real_server(tmp_path_factory.mktemp("pipeline"), engine_arg=("tokens=8",), admin_key=KEY) as address:
        yield address


def configured(folder: Path, *overrides: str, each: int = 6) -> AgenticConfig:
    pytest.importorskip("gem")
    path = folder / "guessing.yaml"
    path.write_text(YAML.format(dump=folder / "dump", each=each))
    return AgenticConfig.from_yaml(path, overrides)


def check_batch(client: Client, batch: DataProto) -> None:
    """Two whole groups, each row exactly as its session exports it."""
    groups = list(batch.non_tensor_batch["traj_group_id"])
    assert sorted(groups.count(name) for name in set(groups)) == [2, 2]
    assert {name.split("_")[0] for name in groups} == {"Guess", "Mastermind"}
    names = batch.meta_info["session_ids"]
    assert len(set(names)) == len(batch) == 4
    samples = {sample.session_id: sample for sample in client.export(session_ids=names).samples}
    for row, name in enumerate(names):
        sample, length = samples[name], len(samples[name].input_ids)
        assert batch.batch["input_ids"][row, :length].tolist() == sample.input_ids.tolist()
        assert batch.batch["response_mask"][row, :length].tolist() == sample.loss_mask.astype(bool).tolist()
        assert not batch.batch["response_mask"][row, length:].any() and sample.loss_mask.sum() > 0
        assert np.allclose(batch.batch["infer_logprobs"][row, : length - 1], sample.logprobs[1:])


@pytest.mark.wide
def test_a_pipeline_runs_the_steps_of_a_yaml_in_worker_processes(url: str, tmp_path: Path) -> None:
    config = configured(tmp_path, each=3)
    with Client(url, KEY) as client:
        steps = list(AgenticRolloutPipeline(config, client=client).steps())
        assert [step.global_step for step in steps] == [0, 1]
        for step in steps:
            check_batch(client, step.batch)
        first, second = (step.metrics for step in steps)
        assert first["scheduler/group_filter_count"] == 2 and second["scheduler/group_filter_count"] == 0
        scores = get_episode_scores(steps[0].batch)
        assert first["rollout/score/mean"] == pytest.approx(scores.mean())
        assert first["rollout/score/min"] <= first["rollout/Guess/score/max"] <= first["rollout/score/max"]
        assert first["rollout/response_length/mean"] > 0 and "env/Mastermind/num_actions" in first
        assert (
            "val/score/mean" in first and "val/Mastermind/score/max" in first and "val/env/Guess/num_actions" in first
        )
        assert "val/score/mean" not in second
        assert not set(steps[0].batch.meta_info["session_ids"]) & set(steps[1].batch.meta_info["session_ids"])
        assert client.sessions({"status": "active"}) == []
        assert client.claim(limit=1000, filter={"outcome": "Finished"}).sessions == {}  # nothing is left to train
    for step in (0, 1):
        dumped = json.loads((tmp_path / "dump" / f"rollout_dump_data.step_{step}.jsonl").read_text())
        assert dumped["global_step"] == [step] * 4 and dumped["exp_name"] == ["guessing"] * 4
        assert json.loads(dumped["messages"][0])[0]["role"] == "system"
        assert "messages" not in steps[step].batch.non_tensor_batch
    assert len(json.loads((tmp_path / "dump/val/rollout_dump_data.step_0.jsonl").read_text())["messages"]) == 4


def test_run_returns_the_metrics_of_each_step(url: str, tmp_path: Path) -> None:
    config = configured(tmp_path, "max_steps=1", "eval_steps=0", "train_env_manager.group_size_redundancy=0")
    metrics = AgenticRolloutPipeline(config, url=url, admin_key=KEY).run()
    assert len(metrics) == 1 and metrics[0]["time/step_rollout"] > 0
    assert not any(name.startswith("val/") for name in metrics[0])


def test_a_pipeline_ends_with_the_data(url: str) -> None:
    config = settings(groups=1, size=2, env={"data": 2}, max_steps=-1)
    assert len(AgenticRolloutPipeline(config, url=url, admin_key=KEY).run()) == 2


def test_a_pipeline_that_is_left_ends_all_environments(url: str) -> None:
    pipeline = AgenticRolloutPipeline(settings(groups=1, size=2, max_steps=-1), url=url, admin_key=KEY)
    steps = pipeline.steps()
    assert next(steps).global_step == 0
    steps.close()  # type: ignore[attr-defined]
    with Client(url, KEY) as client:
        assert client.sessions({"status": "active"}) == []


def test_a_dump_without_a_folder_is_refused(url: str) -> None:
    config = settings(groups=1, size=1, rollout_dump_dir="odps://project/tables/t")
    with pytest.raises(InvalidRequest, match="must be a folder"):
        AgenticRolloutPipeline(config, url=url)


def test_a_dump_has_the_columns_that_are_named_without_rows_that_lack_one(tmp_path: Path) -> None:
    rewards = np.empty(2, dtype=object)
    rewards[:] = [np.array([1.0, 0.5]), np.array([])]
    columns = {"id": np.array(["a", "b"], dtype=object), "n": np.array([np.int64(3), None], dtype=object), "r": rewards}
    batch = DataProto(
        None,
        {**columns, "kept": np.array([1, 2])},
        {"COLUMNS_CONFIG": [["id", "string"], ["n", "bigint"], ["r", "array"]]},
    )
    dump_rollout_trajectories(tmp_path, 7, batch)
    text = (tmp_path / "rollout_dump_data.step_7.jsonl").read_text()
    assert text == '{"id": ["a"], "n": [3], "r": [[1.0, 0.5]], "global_step": [7]}\n'
    assert list(batch.non_tensor_batch) == ["kept"]
    dump_rollout_trajectories(None, 8, batch)
    dump_rollout_trajectories(tmp_path, 8, batch)
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_dump_data.step_7.jsonl"]


def test_batches_are_written_and_read_in_place_of_episodes(url: str, tmp_path: Path) -> None:
    mock = SimpleNamespace(enable=True, mode="dump", dump_dir=str(tmp_path))
    config = settings(groups=1, size=2, rollout_mock=mock)
    at = DataProto(meta_info={"global_step": 3})
    with RolloutScheduler(config, config.train_env_manager, url=url, admin_key=KEY) as train:
        played = train.get_batch(at, 2)
    assert [path.name for path in (tmp_path / "train").iterdir()] == ["step_000003.pkl"]
    mock.mode = "mock"
    with RolloutScheduler(config, config.train_env_manager, url="http://127.0.0.1:1") as train:
        read = train.get_batch(at, 2)
        with pytest.raises(FileNotFoundError, match=r"step_000004\.pkl does not exist; run the step with mode: dump"):
            train.get_batch(DataProto(meta_info={"global_step": 4}), 2)
    assert played is not None and read is not None
    assert read.batch["input_ids"].tolist() == played.batch["input_ids"].tolist()
    assert read.meta_info["session_ids"] == played.meta_info["session_ids"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *(("a", 2.0), ("a_max", 4.0), ("a@min", 1.0), ("a_sum", 8.0), ("a@p50", 1.5), ("a_mean", 2.0)),
        *(("a_std", 1.2247448), ("a@p99", 3.94)),
    ],
)
def test_the_end_of_a_metrics_name_says_how_it_is_reduced(name: str, expected: float) -> None:
    values: list[Any] = [1, 4, 1, 2]
    assert reduce_metrics({name: values})[name] == pytest.approx(expected)
    assert reduce_metrics({name: 3.5, "empty": []}) == {name: 3.5, "empty": []}


def test_an_unknown_word_after_the_at_sign_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="none of mean, max, min, p50, p99, std, sum"):
        reduce_metrics({"loss@most": [1.0]})
