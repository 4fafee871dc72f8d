"""`--config`: a run's own keys by name and type, the server's section, and ROLL's YAML as one batch of episodes."""

from __future__ import annotations

import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

from tokengrove.errors import ConfigurationError
from tokengrove.roll.config import AgenticConfig
from tokengrove.runs import RunOptions, prepare
from tokengrove.runs.config import of_roll, read

OWN = """
defaults:
  - ../shared/base@_here_
agent: my_agents:Player
agent_arg: {turns: 3, words: [a, b]}
data: tasks.jsonl
group_size: ${size}
size: 4
sampling: {temperature: 0.7}
scorer: my_scores:length
reward: my_rewards:exact
timeout_s: 30
server:
  engine: scripted
  engine_arg: [play=agent]
  admin_key: ${oc.env:KEY_OF_A_TEST,none-given}
"""
BASE = """
concurrency: 8
group_size: 2
retries: 5
"""
ROLL = """
exp_name: boxes
pretrain: org/model
seed: 7
rollout_batch_size: 12
val_batch_size: 3
sequence_length: 512
max_steps: 100
eval_steps: 10
adv_estimator: grpo
reward_clip: 5
template: "Go."
actor_train: {device_mapping: "list(range(0,8))"}
reward: {pretrain: nobody/nothing}
actor_infer:
  generating_args: {max_new_tokens: 64, temperature: 0.5}
train_env_manager:
  max_env_num_per_worker: 4
  format_penalty: -0.15
  num_env_groups: 3
  group_size: 2
  group_size_redundancy: 1
  tags: [Boxes, Lake]
  num_groups_partition: [2, 1]
val_env_manager:
  num_env_groups: 3
  group_size: 1
  tags: [Lake]
custom_envs:
  Boxes:
    env_type: boxes
    max_tokens_per_step: 32
    agent_template: ${template}
    env_manager_cls: roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager
  Lake:
    env_type: lake
    env_manager_cls: roll.pipeline.agentic.env_manager.proxy_env_manager.ProxyEnvManager
    agent_runner_cls: roll.pipeline.agentic.agent_runner.gem_runner.GEMRunner
    env_config: {tool_call_parser: hermes}
"""


def written(folder: Path, text: str, name: str = "runs/run.yaml") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def own_yaml(tmp_path: Path) -> Path:
    written(tmp_path, BASE, "shared/base.yaml")
    return written(tmp_path, OWN)


def test_options_are_read_by_their_names_from_a_file_and_those_of_its_defaults(
    own_yaml: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEY_OF_A_TEST", "secret-of-a-test")
    file = read(own_yaml)
    assert file.values == {
        "agent": "my_agents:Player",
        "agent_arg": {"turns": 3, "words": ["a", "b"]},
        "data": str(own_yaml.parent / "tasks.jsonl"),
        "group_size": 4,
        "concurrency": 8,
        "retries": 5,
        "sampling": {"temperature": 0.7},
        "scorer": ("my_scores:length",),
        "reward": "my_rewards:exact",
        "timeout_s": 30,
    }
    assert file.server == {"engine": "scripted", "engine_arg": ["play=agent"], "admin_key": "secret-of-a-test"}
    assert file.tasks is None
    assert file.folder == own_yaml.parent
    RunOptions(**file.values).checked()


def test_the_command_line_wins_over_changes_and_these_over_the_file(own_yaml: Path) -> None:
    file = read(own_yaml, ["group_size=16", "retries=1", "seed=3", "server.port=0"], given={"retries": 0})
    values = file.values
    assert (values["group_size"], values["retries"], values["seed"]) == (16, 0, 3)
    assert file.server["port"] == 0


def test_paths_are_those_from_the_folder_of_the_file_and_functions_stay(tmp_path: Path) -> None:
    text = "data: ../data/tasks.csv\nfolder: out\noutput: /abs/samples.npz\nagent: a:B\n"
    values = read(written(tmp_path, text)).values
    assert Path(values["data"]).resolve() == tmp_path / "data" / "tasks.csv"
    assert values["folder"] == str(tmp_path / "runs" / "out")
    assert values["output"] == "/abs/samples.npz"
    assert read(written(tmp_path, "data: my.tasks:make")).values["data"] == "my.tasks:make"


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("command: [solve, --all, 3]", ("solve", "--all", "3")),
        ("""command: solve "{prompt}" --all""", ("solve", "{prompt}", "--all")),
    ],
)
def test_a_command_is_a_list_of_words_or_a_text_as_in_a_shell(
    tmp_path: Path, text: str, command: tuple[str, ...]
) -> None:
    assert read(written(tmp_path, text)).values == {"command": command}


@pytest.mark.parametrize(
    ("text", "overrides", "message"),
    [
        ("grup_size: 3", [], "there is no setting 'grup_size'; did you mean 'group_size'?"),
        ("group-size: 3", [], "there is no setting 'group-size'; did you mean 'group_size'?"),
        ("scorers: [a:b]", [], "there is no setting 'scorers'; did you mean 'scorer'?"),
        ("qqq: 3", [], "there is no setting 'qqq'; there are agent, command,"),
        ("3: many\nagent: a:B", [], "there is no setting 3; there are agent, command,"),
        ("validation: true", [], "there is no setting 'validation'"),
        ("group_size: many", [], "group_size must be an integer, not 'many'"),
        ("agent: 3", [], "agent must be a text, not 3"),
        ("sampling: [0.5]", [], "sampling must be a mapping, not [0.5]"),
        ("scorer: {a: b}", [], "scorer must be a list, each a text, not {'a': 'b'}"),
        ("server: scripted", [], "server must be a mapping of settings of `tokengrove serve`, not 'scripted'"),
        ("agent: a:B", ["grup=3"], "the override 'grup=3': the configuration has no 'grup'; to add it, write +grup=3"),
        ("- a", [], "must be a mapping, not list"),
        ("agent: ${nothing}", [], "nothing"),
    ],
)
def test_what_is_wrong_is_named_with_its_file(tmp_path: Path, text: str, overrides: list[str], message: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigurationError) as error:
        read(path, overrides)
    assert str(error.value).startswith(f"--config {path}: ")
    assert message in str(error.value)


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"nothing\.yaml.*cannot be read"):
        read(tmp_path / "nothing.yaml")


def test_a_name_that_only_a_changed_value_needed_is_no_error(tmp_path: Path) -> None:
    path = written(tmp_path, "agent: a:B\nsize: 4\ngroup_size: ${size}")
    assert read(path, ["group_size=2"]).values["group_size"] == 2


def test_an_agentic_yaml_of_roll_is_one_batch_whose_groups_play_in_turns(tmp_path: Path) -> None:
    file = read(written(tmp_path, ROLL))
    values = dict(file.values)
    arguments = values.pop("agent_arg")
    assert values == {"agent": of_roll.AGENT, "group_size": 2, "concurrency": 6, "seed": 7}
    assert arguments["mode"] == "train"
    assert "actor_train" not in arguments["config"] and arguments["config"]["template"] == "Go."
    assert "format_penalty" not in arguments["config"]["train_env_manager"]  # each worker process would tell of it
    assert file.model == "org/model"
    assert file.tasks is not None
    assert [task.task_id for task in file.tasks] == [
        *("Boxes-0-0", "Boxes-1-0", "Lake-2-0"),
        *("Boxes-0-1", "Boxes-1-1", "Lake-2-1"),
    ]
    first, again = file.tasks[0].data, file.tasks[3].data
    assert first["tag"] == "Boxes" and again["seed"] == first["seed"] + 1
    groups = AgenticConfig(arguments["config"]).train_env_manager.env_configs
    assert first["seed"] == 7 + groups[0][0]["group_seed"]
    RunOptions(**file.values).checked()
    pickle.loads(pickle.dumps(file))


NUMBERED = """
sequence_length: 512
rollout_batch_size: 2
train_env_manager: {num_env_groups: 1, group_size: 2, tags: [Signs]}
marks:
  Signs:
    env_type: sokoban
    agent_template: "{observation}"
    max_steps: 3
    env_config:
      dim_room: [6, 6]
      num_boxes: 1
      grid_lookup: {0: W, 1: _, 2: G, 3: C, 4: B, 5: A, 6: X}
      grid_vocab: {W: wall, _: floor, true: yes}
custom_envs: ${marks}
metadata: {5: five}
"""


def test_numbers_may_be_keys_of_a_run_that_is_started_and_resumed(tmp_path: Path) -> None:
    path = written(tmp_path, NUMBERED)
    made = []
    for resumed in (False, True):
        file = read(path)
        prepared = prepare(RunOptions(**file.values, folder=str(tmp_path / "out")), file.tasks)
        assert prepared.folder is not None and prepared.folder.resumed is resumed
        prepared.folder.write_summary({})
        made.append(prepared.folder.path)
        prepared.folder.close()
        environments = AgenticConfig(file.values["agent_arg"]["config"]).train_env_manager.env_configs
        assert environments[0][0]["config"]["grid_lookup"][6] == "X"
    assert made[0] == made[1]
    before = read(written(tmp_path, NUMBERED.replace("6: X", "6: Y")))
    other = prepare(RunOptions(**before.values, folder=str(tmp_path / "out")), before.tasks)
    assert other.folder is not None and other.folder.path != made[0]
    other.folder.close()


def test_sessions_of_a_tag_are_sampled_as_its_manager_wants_it(tmp_path: Path) -> None:
    tasks = read(written(tmp_path, ROLL)).tasks
    assert tasks is not None
    boxes, lake = tasks[0].options, tasks[2].options
    assert (boxes["sampling"]["temperature"], boxes["sampling"]["max_tokens"]) == (0.5, 32)
    assert boxes["limits"] == {"max_context_tokens": 512, "max_tokens_per_turn": 32}
    assert boxes["sampling_policy"] == "default" and lake["sampling_policy"] == "override"
    assert lake["limits"]["max_tokens_per_turn"] == 64 and lake["tool_parser"] == "hermes"
    assert boxes["metadata"] == {"tag": "Boxes", "exp_name": "boxes", "mode": "train"}


def test_eval_plays_the_environments_of_the_validation(tmp_path: Path) -> None:
    file = read(written(tmp_path, ROLL), validation=True)
    assert file.tasks is not None
    assert [task.task_id for task in file.tasks] == ["Lake-0-0", "Lake-1-0", "Lake-2-0"]
    assert file.values["agent_arg"]["mode"] == "val"
    assert (file.values["group_size"], file.values["concurrency"]) == (1, 3)


def test_a_run_without_a_seed_in_the_file_has_the_same_groups_each_time(tmp_path: Path) -> None:
    path = written(tmp_path, ROLL.replace("seed: 7\n", ""))
    assert read(path).tasks == read(path).tasks
    assert read(path).tasks != read(path, given={"seed": 1}).tasks
    assert read(path, ["seed=1"]).tasks == read(path, given={"seed": 1}).tasks


def test_changes_of_roll_and_of_the_run_stand_beside_each_other(tmp_path: Path) -> None:
    changes = ["rollout_batch_size=24", "train_env_manager.num_env_groups=6", "concurrency=3"]
    changes += ["train_env_manager.num_groups_partition=[4,2]", "timeout_s=9.5"]
    file = read(written(tmp_path, ROLL), changes, given={"group_size": 4, "executor": "process"})
    assert file.tasks is not None and len(file.tasks) == 6
    assert (file.values["group_size"], file.values["concurrency"], file.values["timeout_s"]) == (4, 3, 9.5)
    assert file.values["agent_arg"]["config"]["train_env_manager"]["group_size"] == 4
    assert file.values["executor"] == "process"


@pytest.mark.parametrize("given", [{"agent": "my:Agent"}, {"command": ("solve",)}])
def test_an_agent_of_the_run_plays_with_the_numbers_of_roll(tmp_path: Path, given: dict[str, Any]) -> None:
    file = read(written(tmp_path, ROLL), given=given)
    assert file.tasks is None
    values = dict(file.values)
    sampling = values.pop("sampling")
    assert (sampling["temperature"], sampling["max_tokens"]) == (0.5, 64)
    assert values == {
        "group_size": 2,
        "concurrency": 6,
        "limit": 6,
        "seed": 7,
        "sampling_policy": "override",
        "limits": {"max_context_tokens": 512},
        **given,
    }


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("sequence_length: 512", "sequence_length: 512\nsequence_lenght: 64", "did you mean 'sequence_length'?"),
        ("  group_size: 2", "  group_size: 2\n  group_sise: 4", "train_env_manager has no setting 'group_sise'"),
    ],
)
def test_a_misspelt_name_of_roll_is_told_with_an_agent_of_the_run_too(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        read(written(tmp_path, ROLL.replace(old, new, 1)), given={"agent": "my:Agent"})
    assert message in str(error.value)


def test_what_has_no_effect_is_said_once_and_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_roll, "_said", set())
    path = written(tmp_path, f"{ROLL}\napply_reward_discount: true\n")
    with caplog.at_level(logging.WARNING):
        read(path)
        read(path)
    [told] = [record.getMessage() for record in caplog.records if "in a run" in record.getMessage()]
    for name in ("max_steps (a run", "eval_steps (tokengrove eval", "max_env_num_per_worker", "group_size_redundancy"):
        assert name in told
    assert "apply_reward_discount (give export: {layout: individual}" in told


def test_processes_take_the_place_of_workers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_roll, "_said", set())
    with caplog.at_level(logging.WARNING):
        read(written(tmp_path, ROLL), given={"executor": "process"})
    assert "group_size_redundancy" in caplog.text and "max_env_num_per_worker" not in caplog.text


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("exp_name", "concurency", "there is no setting 'concurency'; did you mean 'concurrency'?"),
        ("sequence_length", "sequence_lenght", "did you mean 'sequence_length'?"),
        ("rollout_batch_size: 12", "rollout_batch_size: 13", "rollout_batch_size=13 must be a multiple"),
        ("rollout_batch_size: 12", "rollout_batch_size: -1", "rollout_batch_size is -1"),
        ("  Boxes:", "  Boxen:", "tags has 'Boxes', which custom_envs lacks"),
        ("train_env_manager", "ppo_epochs: 1\nignored", "train_env_manager has no environments to play"),
    ],
)
def test_what_roll_refuses_is_named(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        read(written(tmp_path, ROLL.replace(old, new)))
    assert message in str(error.value)
