"""Settings that a user misspelt are named before any sample runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from proxy.errors import InvalidRequest
from proxy.rollout.verl import AgentLoopManager
from proxy.rollout.verl.settings import DEFAULTS

URL = "http://127.0.0.1:1"


def configured(**rollout: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": rollout}}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (configured(respons_length=3), "rollout.respons_length is no .* did you mean .*rollout.response_length"),
        (configured(temprature=0.5), "did you mean actor_rollout_ref.rollout.temperature"),
        (configured(multi_turn={"max_assistant_turn": 2}), "mean .*multi_turn.max_assistant_turns"),
        (configured(val_kwargs={"topp": 1.0}), "mean .*val_kwargs.top_p"),
        ({**configured(), "trainer": {"project": "sums", "projct_name": "sums"}}, "mean trainer.project_name"),
        ({"actor_rollout": {"rollout": {}}}, "did you mean actor_rollout_ref"),
        ({"rollout": {"prompt_length": 3}}, "no 'actor_rollout_ref'"),
    ],
)
def test_a_misspelt_setting_is_named_with_the_one_that_was_meant(config: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        AgentLoopManager(config, URL)


@pytest.mark.parametrize("config", [{}, None, DEFAULTS, configured(enable_chunked_prefill=True, max_num_seqs=8)])
def test_settings_of_the_trainer_alone_are_no_misspelling(config: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AgentLoopManager(config, URL)


@pytest.mark.parametrize("name", ["prompt_length", "response_length", "max_model_len"])
@pytest.mark.parametrize("value", ["256", 0, -1, 1.5, True])
def test_a_length_that_is_no_positive_integer_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"actor_rollout_ref.rollout.{name} must be a positive integer"):
        AgentLoopManager(configured(**{name: value}), URL)


@pytest.mark.parametrize(
    ("name", "value"), [("max_parallel_calls", None), ("max_user_turns", "2"), ("max_assistant_turns", -1)]
)
def test_a_limit_of_turns_or_calls_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidRequest, match=f"multi_turn.{name} must be"):
        AgentLoopManager(configured(multi_turn={name: value}), URL)
