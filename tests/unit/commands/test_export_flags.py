"""Every field of an export's body has a flag, and the server reads its value as intended."""

from __future__ import annotations

import inspect
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from proxy.api.export_request import parse_export
from proxy.export_formats.encoder import ExportFormat
from proxy.store.values import Wanted
from proxy.trajectory.advantages import Baseline
from proxy.trajectory.freshness import Freshness
from proxy.trajectory.layout_options import Images, Include, Keep, Layout, LayoutOptions, Padding, TooLong
from proxy.trajectory.main_reward import MainReward
from proxy.trajectory.paths import Drift
from proxy.trajectory.scores import RewardScope, Unrewarded
from proxy.trajectory.selection import TrainSelection, TurnSelection
from proxy.types import Credit, Outcome, SessionStatus
from tokengrove.client.export_files import export_files
from tokengrove.commands.export import export
from tokengrove.commands.export_flags import ExportFlags
from tokengrove.errors import ConfigurationError, InvalidRequest


def test_without_flags_the_server_decides_all_but_the_layout() -> None:
    assert ExportFlags().body() == {"layout": "concat"}


def test_flags_of_value_0_are_sent() -> None:
    body = ExportFlags(since=0.0, min_version=0, max_version_span=0, discount=0.0, pad_token_id=0, wait_s=0.0).body()
    assert body["filter"] == {"since": 0.0, "min_version": 0, "max_version_span": 0}
    assert {body[name] for name in ("discount", "pad_token_id", "wait_s")} == {0}


def test_every_flag_is_read_by_the_server_as_it_was_meant() -> None:
    flags = ExportFlags(
        session=("a", "b"),
        group="g",
        task="t",
        status="ended",
        outcome="Finished",
        since=5.0,
        purpose=("main", "subagent"),
        agent=("solver",),
        wait_s=2.0,
        layout="padded",
        format="parquet",
        page_size=7,
        discount=0.5,
        credit="linear",
        drift="mask",
        include=("messages", "text"),
        images="bytes",
        multi_modal_inputs=True,
        reward_name="style",
        reward_scope="path",
        unrewarded="zero",
        advantages="grpo",
        step_advantages="leave_one_out",
        train_turns="0,2",
        train_purpose=("main",),
        train_agent=("solver", "critic"),
        exclude=("i1",),
        mask_unfinished=True,
        prompt_length=8,
        response_length=16,
        pad_token_id=3,
        on_too_long="truncate",
        keep="tail",
    )
    wanted = parse_export(flags.body())
    assert (wanted.session_ids, wanted.format, wanted.limit, wanted.wait_s) == (
        ("a", "b"),
        ExportFormat.PARQUET,
        7,
        2.0,
    )
    assert wanted.filters == {
        "group_id": "g",
        "task_id": "t",
        "status": SessionStatus.ENDED,
        "outcome": Outcome.FINISHED,
        "since": 5.0,
    }
    assert wanted.options == LayoutOptions(
        layout=Layout.PADDED,
        discount=0.5,
        credit=Credit.LINEAR,
        drift=Drift.MASK,
        purposes=frozenset({"main", "subagent"}),
        agents=frozenset({"solver"}),
        train=TrainSelection(
            turns=frozenset({0, 2}),
            purposes=frozenset({"main"}),
            agents=frozenset({"solver", "critic"}),
            exclude=frozenset({"i1"}),
        ),
        reward=MainReward("style"),
        reward_scope=RewardScope.PATH,
        unrewarded=Unrewarded.ZERO,
        mask_unfinished=True,
        padding=Padding(8, 16, 3, TooLong.TRUNCATE, Keep.TAIL),
        advantages=Baseline.GRPO,
        step_advantages=Baseline.LEAVE_ONE_OUT,
        include=frozenset({Include.MESSAGES, Include.TEXT}),
        images=Images.BYTES,
        multi_modal_inputs=True,
    )
    assert parse_export(ExportFlags(train_turns="last").body()).options.train.turns is TurnSelection.LAST
    binary = parse_export(ExportFlags(reward_granularity="binary").body()).options.reward
    assert binary != MainReward("style") and binary != parse_export({}).options.reward


def test_values_are_read_as_json_or_text_with_ranges_and_several_choices() -> None:
    flags = ExportFlags(
        metadata=("env=sokoban", "env=maze", "level=2", "note=a=b", "seed=null"),
        metric=("pass_rate>=0.5", "pass_rate<=1", "won=true"),
        rewarded="true",
        validation="only",
    )
    body = flags.body()["filter"]
    assert body["metadata"] == {"env": ["sokoban", "maze"], "level": 2, "note": "a=b", "seed": None}
    assert body["metrics"] == {"pass_rate": {"min": 0.5, "max": 1}, "won": True}
    wanted = parse_export(flags.body()).filters
    assert (wanted["rewarded"], wanted["validation"]) == (True, True)
    assert wanted["metadata"]["env"] == Wanted(("sokoban", "maze"))
    assert wanted["metrics"]["pass_rate"] == Wanted(least=0.5, most=1.0)
    assert parse_export(ExportFlags(rewarded="false").body()).filters["rewarded"] is False
    with pytest.raises(InvalidRequest, match=r"'filter\.rewarded' must be true or false"):
        parse_export(ExportFlags(rewarded="yes").body())


@pytest.mark.parametrize("given", ["env", "=x", ">=1", "won>true", "rate>=fast"])
def test_a_value_that_cannot_be_read_is_refused_by_its_flag(given: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--metric {given} is not valid"):
        ExportFlags(metric=(given,)).body()


def test_a_value_and_a_range_of_one_key_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--metadata level>=1"):
        ExportFlags(metadata=("level=1", "level>=1")).body()


def test_versions_are_filters() -> None:
    options = parse_export(ExportFlags(min_version=3, max_version_span=1).body()).options
    assert options.freshness == Freshness(min_version=3, max_version_span=1)


def test_turns_that_are_no_indexes_are_refused_by_their_flag() -> None:
    with pytest.raises(ConfigurationError, match="--train-turns 0,x is not valid"):
        ExportFlags(train_turns="0,x").body()


def test_the_command_has_every_flag() -> None:
    parameters = inspect.signature(export).parameters
    assert {spec.name for spec in fields(ExportFlags)} <= set(parameters)
    assert all(spec.metadata["help"] for spec in fields(ExportFlags))


@pytest.mark.parametrize("asked", [{"images": "bytes"}, {"multi_modal_inputs": True}])
def test_a_file_of_lines_refuses_images_before_it_asks_the_server(tmp_path: Path, asked: dict[str, Any]) -> None:
    flag = next(iter(asked)).replace("_", "-")
    with pytest.raises(ConfigurationError, match=f"--{flag}.*--format npz"):
        export_files("http://127.0.0.1:9", None, tmp_path / "samples", asked, "jsonl", quiet=True)
    assert not (tmp_path / "samples").exists()
