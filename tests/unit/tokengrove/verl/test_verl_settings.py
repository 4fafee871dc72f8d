"""Settings that a user misspelt are named before any sample runs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.verl import AgentLoopManager
from tokengrove.verl.settings import DEFAULTS

URL = "http://127.0.0.1:1"


def configured(**rollout: Any) -> dict[str, Any]:
    return {"actor_rollout_ref": {"rollout": rollout}}


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (configured(respons_length=3), "rollout.respons_length is not .* did you mean .*rollout.response_length"),
        (configured(temprature=0.5), "did you mean actor_rollout_ref.rollout.temperature"),
        (configured(multi_turn={"max_assistant_turn": 2}), "mean .*multi_turn.max_assistant_turns"),
        (configured(val_kwargs={"topp": 1.0}), "mean .*val_kwargs.top_p"),
        ({**configured(), "trainer": {"project": "sums", "projct_name": "sums"}}, "mean trainer.project_name"),
        (
            configured(multi_turn={"max_tool_response_length": 64, "max_tool_respons_length": 32}),
            "multi_turn.max_tool_respons_length is not .* did you mean .*multi_turn.max_tool_response_length",
        ),
        (configured(temperature=1.0, temprature=0.5), "did you mean actor_rollout_ref.rollout.temperature"),
        (configured(trace={"backends": "mlflow"}), "mean .*trace.backend"),
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


VERLS_OWN: dict[str, Any] = {
    **dict.fromkeys(("name", "mode", "dtype", "logprobs_mode", "load_format", "engine_kwargs", "checkpoint_engine")),
    **dict.fromkeys(("max_num_seqs", "max_num_batched_tokens", "log_prob_micro_batch_size", "skip_tokenizer_init")),
    **{"temperature": 1.0, "top_k": -1, "top_p": 1, "do_sample": True, "n": 1, "full_determinism": False},
    **{"ignore_eos": False, "over_sample_rate": 0, "skip_rollout": False, "skip": {"enable": False}},
    "val_kwargs": {"_target_": "a.B", "temperature": 0, "top_p": 1.0, "top_k": -1, "n": 1, "do_sample": False},
    "multi_turn": {"_target_": "a.B", "interaction_config_path": None, "tool_config_path": None, "format": "hermes"},
    "agent": {"_target_": "a.B", "num_workers": 8, "custom_async_server": {"_target_": "a.B", "path": None}},
    "trace": {"_target_": "a.B", "backend": None, "token2text": False, "max_samples_per_step_per_worker": None},
}


def test_what_verl_writes_by_default_needs_no_warning() -> None:
    data = {"tool_config_path": None, "seed": None, "val_max_samples": -1, "max_prompt_length": 512}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        AgentLoopManager({**configured(**VERLS_OWN), "data": data, "trainer": {"rollout_data_dir": None}}, URL)


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({"agent": {"custom_async_server": {"path": "a.py"}}}, "custom_async_server.path='a.py' has no"),
        ({"agent": {"custom_async_server": {"name": "B"}}}, "custom_async_server.name='B' has no effect: the server"),
        ({"multi_turn": {"interaction_config_path": "i.yaml"}}, "interaction_config_path='i.yaml' has no effect"),
        ({"over_sample_rate": 0.2}, "over_sample_rate=0.2 has no effect: every sample"),
        ({"do_sample": False, "temperature": 0.7}, "rollout.temperature=0.7 has no effect: do_sample is false"),
        ({"val_kwargs": {"do_sample": False, "top_k": 4}}, "val_kwargs.top_k=4 has no effect: do_sample is false"),
        ({"val_kwargs": {"do_sample": True}}, "val_kwargs.temperature is 0, which is greedy, although do_sample"),
    ],
)
def test_a_setting_that_has_no_effect_is_named_with_the_reason(rollout: dict[str, Any], told: str) -> None:
    with pytest.warns(UserWarning, match=told):
        AgentLoopManager(configured(**rollout), URL)


@pytest.mark.parametrize(
    ("rollout", "told"),
    [
        ({"n": 0}, "rollout.n must be a positive integer, not 0"),
        ({"val_kwargs": {"n": "2"}}, "val_kwargs.n must be a positive integer, not '2'"),
        ({"do_sample": "no"}, "rollout.do_sample must be true or false, not 'no'"),
        ({"full_determinism": 1}, "rollout.full_determinism must be true or false, not 1"),
        ({"trace": {"token2text": "yes"}}, "trace.token2text must be true or false"),
        ({"trace": {"max_samples_per_step_per_worker": 0}}, "max_samples_per_step_per_worker must be a positive"),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(rollout: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        AgentLoopManager(configured(**rollout), URL)


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
