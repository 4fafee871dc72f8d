"""Configurations in every form that trainers keep them in are read alike."""

from __future__ import annotations

import copy
import pickle
from argparse import Namespace
from collections import UserDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.rollout.config import Config, MissingSetting

PLAIN: dict[str, Any] = {"rollout": {"response_length": 8, "val_kwargs": {"temperature": 0.5}}}


@dataclass
class Sampling:
    temperature: float = 0.5


@dataclass
class Rollout:
    response_length: int = 8
    val_kwargs: Sampling = field(default_factory=Sampling)


class Trainer:
    def __init__(self) -> None:
        self.rollout = Namespace(response_length=8, val_kwargs=SimpleNamespace(temperature=0.5))


@pytest.mark.parametrize(
    "source", [PLAIN, UserDict(PLAIN), {"rollout": Rollout()}, SimpleNamespace(rollout=Rollout()), Trainer()]
)
def test_every_form_is_read_by_attribute_and_by_key(source: object) -> None:
    config = Config(source)
    assert config.rollout.response_length == 8
    assert config["rollout"]["val_kwargs"]["temperature"] == 0.5
    assert config.rollout["val_kwargs"].temperature == 0.5
    assert config.rollout.get("trace", {}) == {}
    assert config.select("rollout.val_kwargs.temperature") == 0.5
    assert config.to_dict() == PLAIN
    assert Config(config).to_dict() == PLAIN


def test_a_missing_setting_names_its_whole_path_and_is_an_error_of_both_kinds_of_reading() -> None:
    config = Config(PLAIN)
    with pytest.raises(MissingSetting, match=r"^rollout\.val_kwargs\.top_p is not in the configuration$"):
        config.rollout.val_kwargs.top_p  # noqa: B018
    with pytest.raises(KeyError):
        config["actor"]
    assert not hasattr(config, "actor")
    assert "actor" not in config
    assert config.select("actor.strategy.name", 3) == 3


def test_a_setting_that_must_be_given_is_missing_until_it_is() -> None:
    with pytest.raises(MissingSetting, match=r"^rollout\.name must be set: it is \?\?\?$"):
        Config({"rollout": {"name": "???"}}).rollout.name  # noqa: B018


def test_defaults_fill_what_is_not_given_or_a_section_that_is_null() -> None:
    defaults = {"rollout": {"n": 1, "agent": {"num_workers": 8}, "trace": None}}
    assert Config({}, defaults).rollout.agent.num_workers == 8
    assert Config({"rollout": None}, defaults).rollout.n == 1
    config = Config({"rollout": {"n": 4, "agent": {"kind": "x"}}}, defaults)
    assert (config.rollout.n, config.rollout.agent.num_workers, config.rollout.agent.kind) == (4, 8, "x")
    assert config.to_dict() == {"rollout": {"n": 4, "agent": {"kind": "x", "num_workers": 8}, "trace": None}}


def test_interpolations_have_the_value_of_the_setting_that_they_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN", "seven")
    config = Config(
        {
            "data": {"max_prompt_length": 16, "list": [1, "${data.max_prompt_length}"]},
            "rollout": {
                "prompt_length": "${data.max_prompt_length}",
                "response_length": "${oc.select:data.max_response_length,512}",
                "name": "${oc.select:trainer.name, 'none yet'}",
                "kwargs": "${oc.select:data.kwargs,{}}",
                "strict": "${oc.select:data.strict,False}",
                "nothing": "${oc.select:data.strict}",
                "nested": "${oc.select:data.no,${oc.select:data.max_prompt_length,1}}",
                "same": "${.prompt_length}",
                "deep": {"upper": "${..prompt_length}"},
                "path": "/runs/${oc.env:RUN}/${.prompt_length}",
                "section": "${data}",
            },
        }
    )
    assert config.rollout.section.max_prompt_length == 16
    found = {name: value for name, value in config.to_dict()["rollout"].items() if name != "section"}
    assert found == {
        "prompt_length": 16,
        "response_length": 512,
        "name": "none yet",
        "kwargs": {},
        "strict": False,
        "nothing": None,
        "nested": 16,
        "same": 16,
        "deep": {"upper": 16},
        "path": "/runs/seven/16",
    }
    assert config.data.list == [1, 16]


def test_keys_may_be_numbers_and_lists_are_reached_by_number() -> None:
    config = Config(
        {"look": {0: "W", 1: "${.0}"}, "of_key": "${look.1}", "list": [4, {"a": 5}], "of_list": "${list.1.a}"}
    )
    assert config.look.to_dict() == {0: "W", 1: "W"}
    assert (config.of_key, config.of_list, config.select("list.2")) == ("W", 5, None)


def test_the_time_is_one_moment_and_a_text_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIZES", "[4, 8]")
    config = Config({"run": "${now:%s.%f}", "a": {"again": "${now:%s.%f}"}, "sizes": "${oc.decode:${oc.env:SIZES}}"})
    assert config.run == config.a.again
    assert config.sizes == [4, 8]


def test_defaults_may_refer_to_what_was_given() -> None:
    defaults = {"rollout": {"prompt_length": "${oc.select:data.max_prompt_length,512}"}}
    assert Config({}, defaults).rollout.prompt_length == 512
    assert Config({"data": {"max_prompt_length": 9}}, defaults).rollout.prompt_length == 9


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("${b}", "b is not in the configuration"),
        ("${a}", "leads to itself"),
        ("${hydra:run.dir}", "oc.select"),
        ("${b", "lacks a closing brace"),
        ("${oc.env:TOKENGROVE_NO_SUCH_VARIABLE}", "TOKENGROVE_NO_SUCH_VARIABLE"),
    ],
)
def test_an_interpolation_that_cannot_be_resolved_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        Config({"a": text}).a  # noqa: B018


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'int'"):
        Config(3)


def test_a_configuration_is_copied_and_pickled() -> None:
    config = Config(PLAIN)
    assert copy.deepcopy(config).to_dict() == PLAIN
    assert pickle.loads(pickle.dumps(config)).rollout.response_length == 8
