"""Every field of an export's body has a flag, and the server reads its value as intended."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from proxy.api.export_request import parse_export
from proxy.store.session_query import Wanted
from proxy.trajectory.layout_options import Freshness, LayoutOptions
from proxy.trajectory.main_reward import MainReward
from tokengrove.client.export_files import export_files
from tokengrove.commands.export import export
from tokengrove.commands.export_flags import export_body
from tokengrove.errors import ConfigurationError, InvalidRequest
from tokengrove.options.export import (
    EXPORT_GROUPS,
    Baseline,
    Drift,
    ExportFormat,
    Images,
    Include,
    Keep,
    Layout,
    Padding,
    Stale,
    Teacher,
    TooLong,
    TrainSelection,
    TurnSelection,
    Unrewarded,
)
from tokengrove.options.option import options_of
from tokengrove.options.session import Credit, Outcome, RewardScope, SessionFilter, SessionStatus


def made(**flags: Any) -> dict[str, Any]:
    return export_body(flags)


def test_without_flags_the_server_decides() -> None:
    assert made() == {}


def test_flags_of_value_0_are_sent() -> None:
    body = made(since=0.0, min_version=0, max_version_span=0, discount=0.0, pad_token_id=0, wait_s=0.0)
    assert body["filter"] == {"since": 0.0, "min_version": 0, "max_version_span": 0}
    assert {body[name] for name in ("discount", "pad_token_id", "wait_s")} == {0}


def test_every_flag_is_read_by_the_server_as_it_was_meant() -> None:
    flags = made(
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
    wanted = parse_export(flags)
    page = wanted.page
    assert (page.session_ids, wanted.format, page.limit, page.wait_s) == (
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
        reward_name="style",
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
    assert parse_export(made(train_turns="last")).options.train.turns is TurnSelection.LAST
    binary = parse_export(made(reward_granularity="binary")).options.reward
    assert binary != MainReward("style") and binary != parse_export({}).options.reward


def test_values_are_read_as_json_or_text_with_ranges_and_several_choices() -> None:
    flags = made(
        metadata=("env=sokoban", "env=maze", "level=2", "note=a=b", "seed=null"),
        metric=("pass_rate>=0.5", "pass_rate<=1", "won=true"),
        rewarded="true",
        validation="only",
    )
    body = flags["filter"]
    assert body["metadata"] == {"env": ["sokoban", "maze"], "level": 2, "note": "a=b", "seed": None}
    assert body["metrics"] == {"pass_rate": {"min": 0.5, "max": 1}, "won": True}
    wanted = parse_export(flags).filters
    assert (wanted["rewarded"], wanted["validation"]) == (True, True)
    assert wanted["metadata"]["env"] == Wanted(("sokoban", "maze"))
    assert wanted["metrics"]["pass_rate"] == Wanted(least=0.5, most=1.0)
    assert parse_export(made(rewarded="false")).filters["rewarded"] is False
    with pytest.raises(InvalidRequest, match=r"'filter\.rewarded' must be true or false"):
        parse_export(made(rewarded="yes"))


@pytest.mark.parametrize("given", ["env", "=x", ">=1", "won>true", "rate>=fast"])
def test_a_value_that_cannot_be_read_is_refused_by_its_flag(given: str) -> None:
    with pytest.raises(ConfigurationError, match=f"--metric {given} is not valid"):
        made(metric=(given,))


def test_a_value_and_a_range_of_one_key_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="--metadata level>=1"):
        made(metadata=("level=1", "level>=1"))


def test_versions_are_filters() -> None:
    options = parse_export(made(min_version=3, max_version_span=1)).options
    assert options.freshness == Freshness(min_version=3, max_version_span=1)
    assert options.stale is Stale.DROP
    assert parse_export(made(min_version=3, stale="mask")).options.stale is Stale.MASK


def test_teachers_are_names_with_their_models_and_other_fields() -> None:
    given = parse_export(made(teacher=("ref=reference", "big=policy@7,top_k=8,temperature=0.5"))).options.teachers
    assert given == (
        Teacher(name="ref", model="reference"),
        Teacher(name="big", model="policy@7", top_k=8, temperature=0.5),
    )


@pytest.mark.parametrize("text", ["ref", "=reference", "ref=", "ref=reference,top_k", "ref=reference,"])
def test_a_teacher_without_a_name_or_a_model_is_refused_by_its_flag(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--teacher .* is not valid; give NAME=MODEL"):
        made(teacher=(text,))


def test_turns_that_are_no_indexes_are_refused_by_their_flag() -> None:
    with pytest.raises(ConfigurationError, match="--train-turns 0,x is not valid"):
        made(train_turns="0,x")


def test_every_option_of_an_export_that_a_flag_can_give_has_one() -> None:
    parameters = inspect.signature(export).parameters
    bodies = {"session_id", "cursor", "filter", "train", "style", "outline", "drop_retry_orphans"}
    options = options_of(*EXPORT_GROUPS, SessionFilter, TrainSelection)
    assert {each.parameter for name, each in options.items() if name not in bodies} <= set(parameters)


@pytest.mark.parametrize("asked", [{"images": "bytes"}, {"multi_modal_inputs": True}])
def test_a_file_of_lines_refuses_images_before_it_asks_the_server(tmp_path: Path, asked: dict[str, Any]) -> None:
    flag = next(iter(asked)).replace("_", "-")
    with pytest.raises(ConfigurationError, match=f"--{flag}.*--format npz"):
        export_files("http://127.0.0.1:9", None, tmp_path / "samples", asked, "jsonl", quiet=True)
    assert not (tmp_path / "samples").exists()
