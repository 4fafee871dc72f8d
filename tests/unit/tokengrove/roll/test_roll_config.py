"""ROLL's YAML is read as its users wrote it: defaults lists, interpolations across files, overrides, ROLL's rules."""

from __future__ import annotations

import copy
import logging
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import getbase

from tokengrove.errors import InvalidRequest
from tokengrove.roll.config import AgenticConfig, EnvManagerConfig, GeneratingArguments, compose, sampling_of
from tokengrove.roll.values import Section

ENVS = """
max_tokens: 128
moves: 10
manager: my.agents.Manager
runner: null
custom_env:
  Boxes:
    env_type: boxes
    max_steps: ${moves}
    max_tokens_per_step: ${max_tokens}
    env_manager_cls: ${manager}
    agent_runner_cls: ${runner}
    agent_template: |
      Turn {turn_idx}:
      {observation}
    env_config:
      pattern: <answer>(.*?)</answer>
      penalty: -1e-2
      room: [6, 6]
      max_steps: ${moves}
      look: { 0: "W", 1: "." }
  Lake:
    env_type: lake
    max_steps: ${moves}
    max_tokens_per_step: ${max_tokens}
    env_config: {slippery: no}
"""
RUN = """
defaults:
  - ../shared/envs@_here_

hydra:
  run:
    dir: .
  output_subdir: null

exp_name: "boxes"
seed: 7
rollout_batch_size: 16
val_batch_size: 4
sequence_length: 512
model_name: ${exp_name}-${now:%Y}
tracker_kwargs:
  api_key: ${oc.env:A_KEY_THAT_NOBODY_HAS}
actor_train:
  device_mapping: list(range(0,8))
  training_args: {learning_rate: 1.0e-6}
actor_infer:
  generating_args:
    max_new_tokens: ${max_tokens}
    temperature: 0.5
    num_return_sequences: 4
  strategy_args:
    strategy_config: ~
train_env_manager:
  max_env_num_per_worker: 6
  num_env_groups: 2
  group_size: 4
  tags: [Boxes, Lake]
  num_groups_partition: [1, 1]
val_env_manager:
  num_env_groups: 4
  group_size: 1
  tags: [Boxes, Lake]
max_tokens: 64
runner: my.agents.Runner
custom_envs:
  Boxes:
    ${custom_env.Boxes}
  Lake:
    ${custom_env.Lake}
"""


@pytest.fixture
def run_yaml(tmp_path: Path) -> Path:
    for name, text in (("shared/envs.yaml", ENVS), ("runs/run.yaml", RUN)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "runs" / "run.yaml"


def small(**more: Any) -> dict[str, Any]:
    """A configuration with one group of two environments, and `more`."""
    return {
        "seed": 1,
        "sequence_length": 64,
        "rollout_batch_size": 2,
        "actor_infer": {"generating_args": {}},
        "custom_envs": {"Boxes": {"env_type": "boxes"}},
        "train_env_manager": {"num_env_groups": 1, "group_size": 2, "tags": ["Boxes"]},
        **more,
    }


def test_settings_of_the_run_win_over_those_of_the_files_in_its_defaults(run_yaml: Path) -> None:
    config = AgenticConfig.from_yaml(run_yaml)
    assert (config.exp_name, config.seed, config.sequence_length) == ("boxes", 7, 512)
    boxes = config.custom_envs.Boxes
    assert boxes.max_tokens_per_step == 64  # ENVS has 128, and the texts of both files refer to the merged value
    assert boxes["agent_runner_cls"] == "my.agents.Runner"
    assert boxes.env_config.max_steps == 10
    assert boxes.env_config.look == {0: "W", 1: "."}
    assert boxes.env_config.penalty == -0.01
    assert config.custom_envs.Lake.env_config.slippery is False
    assert boxes.agent_template == "Turn {turn_idx}:\n{observation}\n"
    assert config.actor_train.device_mapping == "list(range(0,8))"
    assert config.actor_train.training_args.learning_rate == 1e-6
    assert config.model_name.startswith("boxes-20")
    assert not hasattr(config, "hydra")


def test_every_environment_has_its_configuration_at_its_worker(run_yaml: Path) -> None:
    manager = AgenticConfig.from_yaml(run_yaml).train_env_manager
    assert (manager.name, manager.world_size, manager.final_group_size) == ("train_env", 2, 4)
    assert {rank: list(envs) for rank, envs in manager.env_configs.items()} == {0: [0, 1, 2, 3, 4, 5], 1: [6, 7]}
    entries = [entry for envs in manager.env_configs.values() for entry in envs.values()]
    assert [(each.env_id, each.group_id, each.tag) for each in entries] == [
        *((env_id, 0, "Boxes") for env_id in range(4)),
        *((env_id, 1, "Lake") for env_id in range(4, 8)),
    ]
    assert entries[0].to_dict() == {
        "env_type": "boxes",
        "max_steps": 10,
        "max_tokens_per_step": 64,
        "env_manager_cls": "my.agents.Manager",
        "agent_runner_cls": "my.agents.Runner",
        "agent_template": "Turn {turn_idx}:\n{observation}\n",
        "tag": "Boxes",
        "group_id": 0,
        "env_id": 0,
        "config": {
            "pattern": "<answer>(.*?)</answer>",
            "penalty": -0.01,
            "room": [6, 6],
            "max_steps": 10,
            "look": {0: "W", 1: "."},
        },
        "env_class": "boxes",
        "group_seed": entries[0].group_seed,
    }
    assert entries[4].env_manager_cls == "roll.pipeline.agentic.env_manager.traj_env_manager.TrajEnvManager"
    entries[0].config.room = [8, 8]
    assert entries[1].config.room == [6, 6]  # no environment shares its configuration


def test_environments_of_a_group_share_a_seed_and_a_run_with_a_seed_can_be_repeated() -> None:
    def seeds(config: AgenticConfig, name: str = "train_env_manager") -> list[int]:
        envs = getattr(config, name).env_configs[0].values()
        return [each.group_seed for each in envs]

    managers = {
        name: {"num_env_groups": 2, "group_size": 2, "tags": ["Boxes"]}
        for name in ("train_env_manager", "val_env_manager")
    }
    values = small(**managers, rollout_batch_size=4, val_batch_size=4)
    config = AgenticConfig(values)
    first, second, third, fourth = seeds(config)
    assert first == second != third == fourth
    assert seeds(AgenticConfig(values)) == seeds(config) != seeds(AgenticConfig(values, seed=2))
    assert seeds(config, "val_env_manager") != seeds(config)
    del values["seed"]
    assert seeds(AgenticConfig(values)) != seeds(AgenticConfig(values))


def test_redundant_environments_belong_to_their_group_and_do_not_count_in_a_batch() -> None:
    config = AgenticConfig(
        small(
            rollout_batch_size=8,
            train_env_manager={"num_env_groups": 2, "group_size": 2, "group_size_redundancy": 1, "tags": ["Boxes"]},
        )
    )
    manager = config.train_env_manager
    assert [each.group_id for each in manager.env_configs[0].values()] == [0, 0, 0, 1, 1, 1]
    assert (manager.final_group_size, manager.world_size, manager.max_env_num_per_worker) == (3, 1, 6)
    assert manager.max_traj_per_env == 2


def test_overrides_are_those_of_the_command_line(run_yaml: Path) -> None:
    config = AgenticConfig.from_yaml(
        run_yaml,
        [
            "train_env_manager.group_size=2",
            "train_env_manager.tags=[Boxes]",
            "~train_env_manager.num_groups_partition",
            "+train_env_manager.group_size_redundancy=1",
            "custom_env.Boxes.env_config.look={1:'#'}",  # merged
            "custom_env.Boxes.env_config.room=[${moves},7]",
            "++max_tokens=32",
            "runner=null",
            "max_steps=5",  # not in the file, but a setting
            "+extra={a:1,b:true,l:[1,2]}",
            "++extra={c:3}",
            "extra.l.1=5",
            "exp_name=no",
        ],
    )
    assert (config.train_env_manager.group_size, config.train_env_manager.num_groups_partition) == (2, [2])
    assert config.train_env_manager.final_group_size == 3
    boxes = config.custom_envs.Boxes
    assert (boxes.env_config.look[1], boxes.env_config.room) == ("#", [10, 7])
    assert (boxes.max_tokens_per_step, boxes.agent_runner_cls) == (32, None)
    assert (config.max_steps, config.extra, config.exp_name) == (5, {"a": 1, "b": True, "l": [1, 5], "c": 3}, "no")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train_env_manager.groupsize=4", "no 'groupsize'; did you mean group_size?"),
        ("moves", "Error parsing override 'moves'"),
        ("+moves=1", "already at 'moves'"),
        ("~nothing", "no 'nothing'"),
        ("a.b=1", r"no 'a'; to add it, write \+a.b=1"),
        ("custom_envs.Boxes.max_steps=3", r"change it there: custom_env\.Boxes\.max_steps="),
        ("moves.x=1", "needs a section at moves, which is 10"),
        ("train_env_manager.tags.2=x", "no '2'"),
        ("+db@third=mysql", "group 'db' does not exist"),
        ("custom_env.Boxes.env_config.look.1=x", r"is a number; write custom_env.Boxes.env_config.look=\{1: \.\.\.\}"),
    ],
)
def test_an_override_that_changes_nothing_is_refused(run_yaml: Path, override: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        compose(run_yaml, [override])


def test_a_defaults_list_has_groups_packages_options_and_an_order(tmp_path: Path) -> None:
    for name, text in {
        "main.yaml": (
            "defaults:\n  - base\n  - _self_\n  - db: mysql\n  - /other/extra@deep.er\n"
            "  - optional db@second: none\n  - headed/x\n  - override hydra/job_logging: disabled\na: 1\nb: {c: 2}\n"
        ),
        "base.yaml": "a: 0\nz: 0\nb: {c: 0, d: 0}\n",
        "db/mysql.yaml": "defaults: [inner]\nport: 3306\n",
        "db/postgres.yaml": "port: 5432\n",
        "db/inner.yaml": "timeout: 1\n",
        "other/extra.yaml": "x: ${a}\n",
        "headed/x.yaml": "# @package _global_\nb: {e: 5}\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    main = tmp_path / "main.yaml"
    assert compose(main) == {
        "a": 1,
        "z": 0,
        "b": {"c": 2, "d": 0, "e": 5},
        "db": {"timeout": 1, "port": 3306},
        "deep": {"er": {"x": "${a}"}},
    }
    assert compose(tmp_path / "main", ["db=postgres"])["db"] == {"port": 5432}
    (tmp_path / "outer.yaml").write_text("defaults:\n  - main\n  - override db: postgres\n")
    assert compose(tmp_path / "outer.yaml")["db"] == {"port": 5432}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("defaults: [nowhere]", "names 'nowhere', but there is no file"),
        ("defaults: [main]", "includes? the file itself"),
        ("defaults: [../x]", "there is no file"),
        ("defaults: {a: 1}", "must be a list"),
        ("defaults: [[a]]", "Unsupported type in defaults"),
        ("- a", "must be a mapping, not list"),
        ("a: [", "is not valid YAML"),
        ("a: 1\na: 2", "'a' is there twice"),
        ("a: &x {b: *x}", "inside its own anchor"),
        ("custom_envs: &x [*x]", "inside its own anchor"),
        ("a0: &a0 b\n" + "".join(f"a{n + 1}: &a{n + 1} [*a{n}, *a{n}]\n" for n in range(40)), "1000000 values"),
        ("a: " + "[" * 5000, "is not valid YAML"),
        ("a: {[b]: 1}", "is not valid YAML"),
        ("a: !!int b", "is not valid YAML"),
    ],
)
def test_a_file_that_cannot_be_composed_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "main.yaml").write_text(text)
    with pytest.raises(InvalidRequest, match=message):
        compose(tmp_path / "main.yaml")


def test_a_file_of_training_may_be_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    main = tmp_path / "run" / "main.yaml"
    main.parent.mkdir()
    main.write_text("defaults:\n  - ../config/deepspeed_zero@_here_\n  - ../config/deepspeed_zero3@_here_\na: 1\n")
    assert compose(main) == {"a": 1}
    assert "deepspeed_zero3 is missing" in caplog.text
    assert ".." not in ConfigStore.instance().repo


def test_an_override_may_add_a_file_of_a_group(tmp_path: Path) -> None:
    (tmp_path / "db").mkdir()
    (tmp_path / "db" / "mysql.yaml").write_text("port: 3306\n")
    (tmp_path / "main.yaml").write_text("a: 1\n")
    assert compose(tmp_path / "main.yaml", ["+db@third=mysql"]) == {"a": 1, "third": {"port": 3306}}


@pytest.mark.filterwarnings("ignore:In 'run'")
def test_a_program_of_hydra_keeps_its_own_state(run_yaml: Path) -> None:
    with hydra.initialize_config_dir(config_dir=str(run_yaml.parent), version_base="1.2"):
        own, store = GlobalHydra.instance().hydra, ConfigStore.instance()
        compose(run_yaml)
        with pytest.raises(InvalidRequest):
            compose(run_yaml, ["nothing=1"])
        assert GlobalHydra.instance().hydra is own and ConfigStore.instance() is store
        assert hydra.compose(config_name="run").seed == 7
        assert str(getbase()) == "1.2"
    assert not GlobalHydra.instance().is_initialized()


@pytest.mark.parametrize("package", ["hydra", "omegaconf"])
def test_without_hydra_a_file_with_neither_defaults_nor_changes_is_read(
    run_yaml: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    alone = run_yaml.with_name("alone.yaml")
    alone.write_text("a: ${b}\nb: 1\nhydra: {run: {dir: .}}\n")
    assert compose(alone) == {"a": "${b}", "b": 1}
    for path, overrides in ((run_yaml, []), (alone, ["b=2"])):
        with pytest.raises(InvalidRequest, match=rf"need the package {package}.*pip install 'tokengrove\[roll\]'"):
            compose(path, overrides)


def test_yaml_is_that_of_omegaconf(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        "a: 1e-6\nb: ~\nc: yes\nd: 2024-01-02\ne: &x {f: 1.5}\ng: *x\nh: {<<: *x, i: 0x10}\n"
    )
    assert compose(tmp_path / "a.yaml") == {
        "a": 1e-6,
        "b": None,
        "c": True,
        "d": "2024-01-02",
        "e": {"f": 1.5},
        "g": {"f": 1.5},
        "h": {"f": 1.5, "i": 16},
    }


@pytest.mark.parametrize(
    ("changes", "field", "message"),
    [
        ({"rollout_batch_size": 3}, "rollout_batch_size", "rollout_batch_size=2 or 4"),
        ({"sequence_length": None}, "sequence_length", "response_length"),
        ({"max_steps": 0}, "max_steps", "-1"),
        ({"async_generation_ratio": 1, "generate_opt_level": 0}, "generate_opt_level", "must be 1"),
        ({"val_batchsize": 3}, "val_batchsize", "did you mean 'val_batch_size'"),
        ({"train": {"group_sise": 2}}, "train_env_manager.group_sise", "did you mean 'group_size'"),
        ({"train": {"zebra": 2}}, "train_env_manager.zebra", "it has name, num_env_groups"),
        ({"train": {"group_size": 0}}, "train_env_manager.group_size", "at least 1"),
        ({"train": {"group_size": "two"}}, "train_env_manager.group_size", "an integer, not 'two'"),
        ({"train": {"tags": "Boxes"}}, "train_env_manager.tags", "a list, each a text"),
        ({"train": {"tags": ["Boxs"]}}, "custom_envs.Boxs", "did you mean 'Boxes'"),
        ({"train": {"num_groups_partition": [2]}}, "train_env_manager.num_groups_partition", "sum 2"),
        ({"train": {"num_groups_partition": [1, 0]}}, "train_env_manager.num_groups_partition", "one for each tag"),
        ({"train": {"tags": ["Boxes", "Boxes"]}}, "train_env_manager.num_groups_partition", "divided equally"),
        ({"train": {"max_traj_per_env": 0}}, "train_env_manager.max_traj_per_env", "must play 1"),
        ({"train": {"llm_proxy": {"proxytype": "openai"}}}, "train_env_manager.llm_proxy.proxytype", "'proxy_type'"),
        ({"custom_envs": {"Boxes": {}}}, "custom_envs.Boxes.env_type", "gem"),
        ({"custom_envs": {"Boxes": None}}, "custom_envs.Boxes", "must be a mapping, not None"),
        ({"custom_envs": {"Boxes": {"env_type": "b", "env_config": [1]}}}, "custom_envs.Boxes.env_config", "a mapping"),
        ({"custom_envs": {"Boxes": {"env_type": "b", "max_step": 1}}}, "custom_envs.Boxes.max_step", "'max_steps'"),
        ({"val_env_manager": {"num_env_groups": 4, "tags": ["Boxes"]}, "val_batch_size": 6}, "val_batch_size", "=4"),
        ({"env_monitor": {"hung_time": 3}}, "env_monitor.hung_time", "'hung_timeout'"),
        (
            {"actor_infer": {"generating_args": {"temprature": 1}}},
            "actor_infer.generating_args.temprature",
            "temperature",
        ),
        ({"rollout_mock": {"mode": "dumps"}}, "rollout_mock.mode", "dump or mock"),
        ({"max_steps": 3, "max_stepz": 4}, "max_stepz", "did you mean 'max_steps'"),
        ({"sede": 1}, "sede", "did you mean 'seed'"),
        ({"seed": 1, "sequence_lengths": 4}, "sequence_lengths", "did you mean 'sequence_length'"),
        (
            {"custom_envs": {"Boxes": {"env_type": "b", "max_steps": 1, "max_stepz": 2}}},
            "custom_envs.Boxes.max_stepz",
            "'max_steps'",
        ),
        (
            {
                "custom_envs": {
                    "Boxes": {"env_type": "b", "env_config": {"trajectory_mode": "step", "trajectory_mod": 1}}
                }
            },
            "custom_envs.Boxes.env_config.trajectory_mod",
            "'trajectory_mode'",
        ),
        (
            {"custom_envs": {"Boxes": {"env_type": "b", "env_config": {"episode_timeouts": 3}}}},
            "custom_envs.Boxes.env_config.episode_timeouts",
            "'episode_timeout'",
        ),
        (
            {"actor_infer": {"generating_args": {}, "generating_arg": {"temperature": 1}}},
            "actor_infer.generating_arg",
            "'generating_args'",
        ),
    ],
)
def test_what_roll_asserts_and_what_is_misspelt_is_an_error_that_names_the_field(
    changes: dict[str, Any], field: str, message: str
) -> None:
    values = small()
    values["train_env_manager"].update(changes.pop("train", {}))
    with pytest.raises(InvalidRequest, match=message) as caught:
        AgenticConfig({**values, **changes})
    assert caught.value.param == field


def test_batches_decide_how_often_an_environment_plays() -> None:
    managers = {
        "train_env_manager": {"num_env_groups": 2, "group_size": 2, "tags": ["Boxes"]},
        "val_env_manager": {"num_env_groups": 2, "group_size": 1, "tags": ["Boxes"]},
    }

    def plays(**more: Any) -> tuple[int, int]:
        config = AgenticConfig(small(**managers, **more))
        return config.train_env_manager.max_traj_per_env, config.val_env_manager.max_traj_per_env

    assert plays(rollout_batch_size=10, val_batch_size=6) == (3, 3)
    assert plays(rollout_batch_size=-1, val_batch_size=-1) == (0, sys.maxsize)
    managers["train_env_manager"]["max_traj_per_env"] = 9
    assert plays(rollout_batch_size=4, val_batch_size=2) == (9, 1)
    assert plays(rollout_batch_size=4, val_batch_size=2, async_generation_ratio=1) == (1, 1)


def test_the_validation_batch_is_by_default_one_episode_of_each_environment() -> None:
    config = AgenticConfig(small(val_env_manager={"num_env_groups": 3, "group_size": 2, "tags": ["Boxes"]}))
    assert (config.val_batch_size, config.val_env_manager.max_traj_per_env) == (6, 1)


def test_names_of_users_that_stand_beside_settings_are_their_own() -> None:
    mine = {"max_actions_per_traj": 4, "all_response_pattern": "^(.*)$", "format_penalty_of_boxes": -0.1, "runner": 3}
    environment = {"env_type": "boxes", "env_config": {"max_steps": 4, "num_boxes": 1, "model": "m", "modes": 2}}
    config = AgenticConfig(small(**mine, custom_envs={"Boxes": environment}))
    assert config.max_actions_per_traj == 4
    assert config.train_env_manager.env_configs[0][0]["config"]["modes"] == 2


def test_environments_may_be_those_of_the_included_file_alone() -> None:
    environments = {"Boxes": {"env_type": "boxes", "env_config": {"grid_lookup": {0: "W", 1: "."}}}}
    config = AgenticConfig(small(custom_envs=None, custom_env=environments))
    assert config.train_env_manager.env_configs[0][0]["config"]["grid_lookup"] == {0: "W", 1: "."}


def test_a_tag_may_name_an_environment_of_the_included_file(run_yaml: Path) -> None:
    config = AgenticConfig.from_yaml(run_yaml, ["~custom_envs.Lake"])
    assert config.train_env_manager.env_configs[1][6].env_type == "lake"
    assert list(config.custom_envs) == ["Boxes"]


def test_generating_args_of_actor_infer_are_those_of_both_managers(caplog: pytest.LogCaptureFixture) -> None:
    own = {"num_env_groups": 1, "group_size": 2, "tags": ["Boxes"], "generating_args": {"temperature": 0.2}}
    config = AgenticConfig(small(actor_infer={"generating_args": {"temperature": 0.9}}, train_env_manager=own))
    for args in (config.train_env_manager, config.val_env_manager, config.actor_infer):
        assert args.generating_args.temperature == 0.9
    assert "train_env_manager.generating_args has no effect, as in ROLL" in caplog.text
    config = AgenticConfig(small(actor_infer=None, train_env_manager=own))
    for args in (config.train_env_manager, config.val_env_manager, config.actor_infer):
        assert (args.generating_args.temperature, args.generating_args.top_p) == (0.2, 0.7)
    config = AgenticConfig(small(actor_infer=None))
    assert sampling_of(config.train_env_manager.generating_args) == {
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "max_tokens": 64}
    }


def test_a_distilled_student_is_what_samples() -> None:
    student = {"generating_args": {"temperature": 0.3}}
    config = AgenticConfig(small(actor_infer=None, student_infer=student, is_pure_opd=True))
    assert config.train_env_manager.generating_args.temperature == 0.3


def test_generating_args_become_the_sampling_of_a_session(caplog: pytest.LogCaptureFixture) -> None:
    args = GeneratingArguments(stop_strings=["</a>"], max_new_tokens=20, num_return_sequences=4, seed=3)
    expected = {"temperature": 0.95, "top_p": 0.7, "top_k": 50, "repetition_penalty": 1.0, "stop": ["</a>"], "seed": 3}
    assert sampling_of(args) == {**expected, "max_tokens": 20}
    assert "num_return_sequences=4 has no effect" in caplog.text
    assert sampling_of(args, 8) == sampling_of(args.to_dict(), 8) == {**expected, "max_tokens": 8}
    assert sampling_of(SimpleNamespace(do_sample=False, temperature=0.5, max_new_tokens=-1)) == {"temperature": 0.0}
    assert sampling_of(None, 4) == {"max_tokens": 4}
    for wrong, name in (({"num_beams": 2}, "num_beams"), ({"best_of": 2}, "best_of")):
        with pytest.raises(InvalidRequest, match=f"generating_args.{name}"):
            sampling_of(wrong)


def test_generating_args_are_written_out_as_roll_does() -> None:
    written = GeneratingArguments(max_new_tokens=5).to_dict()
    assert "max_length" not in written and "include_stop_str_in_output" not in written
    assert written["max_new_tokens"] == 5 and written["stop_strings"] is None
    assert GeneratingArguments(max_new_tokens=-1, max_length=9).to_dict()["max_length"] == 9


def test_a_length_may_be_given_as_that_of_prompts_and_responses() -> None:
    config = AgenticConfig(small(sequence_length=None, response_length=100, prompt_length=20))
    assert config.sequence_length == 120


def test_a_manager_that_is_not_configured_has_no_environments() -> None:
    manager = AgenticConfig(small()).val_env_manager
    assert (manager.num_env_groups, manager.world_size, manager.env_configs) == (0, 0, {})


def test_settings_of_training_are_readable_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            config = AgenticConfig(small(kl_horizon=5, critic={"device_mapping": "[1]"}))
    said = [record.getMessage() for record in caplog.records if "kl_horizon" in record.getMessage()]
    assert len(said) == 1 and "critic" in said[0]
    assert (config.kl_horizon, config.critic.device_mapping, config.adv_estimator) == (5, "[1]", "gae")
    assert config.reference == {}
    with pytest.raises(AttributeError, match="did you mean 'sequence_length'"):
        config.sequence_lenght  # noqa: B018


def test_a_configuration_is_copied_pickled_and_written_out() -> None:
    config = AgenticConfig(small(extra={"a": "${seed}"}))
    for each in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert each.to_dict() == config.to_dict()
        assert each.extra.a == 1
    written = config.to_dict()
    assert written["train_env_manager"]["env_configs"][0][0]["tag"] == "Boxes"
    assert type(written["custom_envs"]["Boxes"]) is dict


def test_a_manager_alone_counts_its_workers_and_names_its_fields() -> None:
    manager = EnvManagerConfig(num_env_groups=5, group_size=3, tags=["a", "b"], num_groups_partition=[2, 3])
    assert (manager.max_env_num_per_worker, manager.world_size) == (15, 1)
    assert EnvManagerConfig(num_env_groups=5, group_size=3, max_env_num_per_worker=4).world_size == 4
    with pytest.raises(InvalidRequest, match=r"^group_size is 0"):
        EnvManagerConfig(group_size=0)


def test_dataclasses_are_accepted_as_dacite_makes_them() -> None:
    manager = EnvManagerConfig(num_env_groups=1, group_size=2, tags=["Boxes"])
    values = small()
    values["train_env_manager"] = manager
    config = AgenticConfig(**values)
    assert config.train_env_manager is manager
    assert (manager.name, len(manager.env_configs[0])) == ("train_env", 2)


def test_a_section_stays_one_whatever_is_put_into_it() -> None:
    section = Section(a=1)
    section.update({"b": {"c": 1}}, d=[{"e": 2}])
    section.setdefault("f", {}).g = 3
    assert (section.b.c, section.d[0].e, section.f.g) == (1, 2, 3)
    assert type(section.copy()) is Section
    del section.a
    with pytest.raises(AttributeError):
        del section.a
