"""What agent loops return is checked, and what they get can be used as a list and as verl's class."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.verl import AgentLoopMetrics, AgentLoopOutput, TokenOutput, simple_timer

FIELDS: dict[str, Any] = {"prompt_ids": [1, 2], "response_ids": [3, 4], "response_mask": [1, 0]}


def test_an_output_has_the_names_of_both_forms() -> None:
    output = AgentLoopOutput(**FIELDS, logprobs=[-0.5, 0.0], num_turns=2, metrics={"tool_calls": 1.5, "own": 7})
    assert output.response_logprobs == output.logprobs == [-0.5, 0.0]
    assert output.metrics.model_dump() == {
        "generate_sequences": 0.0,
        "tool_calls": 1.5,
        "compute_score": 0.0,
        "num_preempted": -1,
        "own": 7,
    }
    assert AgentLoopOutput(**FIELDS, response_logprobs=[-0.5, 0.0]).logprobs == [-0.5, 0.0]
    assert AgentLoopOutput(**FIELDS, metrics=AgentLoopMetrics(tool_calls=2.0)).metrics.tool_calls == 2.0


def test_arrays_become_plain_lists() -> None:
    output = AgentLoopOutput(np.array([1, 2]), np.array([3], np.int32), np.array([True]), np.array([-0.5], np.float32))  # type: ignore[arg-type]
    assert (output.prompt_ids, output.response_ids, output.response_mask) == ([1, 2], [3], [1])
    assert output.response_logprobs == [-0.5]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_mask": [1]}, "'response_mask' has 1 values, but 'response_ids' has 2"),
        ({"response_mask": [1, 2]}, "other than 0 and 1"),
        ({"response_logprobs": [-0.5]}, "'response_logprobs' has 1 values"),
        ({"logprobs": [-0.5, math.nan]}, "not finite"),
        ({"reward_score": math.inf}, "'reward_score' is inf"),
        ({"response_ids": "ab"}, "'response_ids' must be a list of integers"),
        ({"prompt_ids": 3}, "'prompt_ids' must be a list of integers"),
        ({"logprobs": [0.0, 0.0], "response_logprobs": [0.0, 0.0]}, "not both"),
    ],
)
def test_an_output_that_does_not_fit_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        AgentLoopOutput(**{**FIELDS, **fields})


def test_an_output_that_was_changed_is_checked_again() -> None:
    output = AgentLoopOutput(**FIELDS)
    output.response_ids = output.response_ids[:1]
    with pytest.raises(InvalidRequest, match="'response_mask'"):
        output.check()


def test_sampled_ids_are_a_list_with_the_attributes_of_verls_class() -> None:
    sampled = TokenOutput([5, 6, 7], [-0.1, -0.2, -0.3], finish_reason="length", versions=[2, 2, 3])
    assert [1, *sampled] == [1, 5, 6, 7]
    assert sampled[:2] == [5, 6]
    assert (sampled.token_ids, sampled.log_probs) == ([5, 6, 7], [-0.1, -0.2, -0.3])
    assert (sampled.stop_reason, sampled.finish_reason, sampled.num_preempted) == ("completed", "length", None)
    assert sampled.extra_fields == {"global_steps": 3, "min_global_steps": 2, "max_global_steps": 3}
    assert TokenOutput([], finish_reason="abort").stop_reason == "aborted"
    assert TokenOutput().extra_fields["global_steps"] is None


def test_a_timer_adds_up_and_counts_what_fails() -> None:
    metrics: dict[str, float] = {"tool_calls": 10.0}
    with simple_timer("tool_calls", metrics):
        pass
    assert metrics["tool_calls"] >= 10.0
    with pytest.raises(ValueError, match="no"), simple_timer("other", metrics):
        raise ValueError("no")
    assert metrics["other"] >= 0.0
