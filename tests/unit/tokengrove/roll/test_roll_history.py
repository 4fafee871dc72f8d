"""What managers compute of observations and steps: hashes of states, rendered templates, metrics of an episode."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tokengrove.errors import InvalidRequest
from tokengrove.roll.managers.history import amended, earned
from tokengrove.roll.managers.live_session import LiveSession
from tokengrove.roll.values import (
    GenerateStopReason,
    aggregate_metrics,
    compute_object_hash,
    contains_renderable_field,
    rendered,
)

DIFFERENT: list[Any] = [
    *(None, "", "None", 1, 1.0, "1", True, b"1", [1], [[1]], ["1", "2"], ["12"], {"a": 1}, {"a": "1"}, {1}, np.int8(1)),
    *(np.array([1]), np.array([1.0]), np.array([[1]]), np.array([1], np.int32), [], {}, np.array(["a", None])),
    *(SimpleNamespace(a=1), [{"role": "user", "content": "a"}], [{"role": "user"}, {"content": "a"}]),
]


def test_states_that_differ_in_value_or_type_have_different_hashes() -> None:
    hashes = [compute_object_hash(value) for value in DIFFERENT]
    assert len(set(hashes)) == len(DIFFERENT)
    assert all(len(each) == 64 and each.isalnum() for each in hashes)


def test_equal_states_have_equal_hashes_whatever_the_order_of_their_entries() -> None:
    assert compute_object_hash({"a": 1, "b": [2, 3]}) == compute_object_hash({"b": [2, 3], "a": 1})
    assert compute_object_hash({3, 1, 2}) == compute_object_hash({2, 1, 3})
    grid = np.arange(12).reshape(3, 4)
    assert compute_object_hash(grid[:, ::2]) == compute_object_hash(grid[:, ::2].copy())
    assert compute_object_hash([2, 3]) != compute_object_hash([3, 2])
    assert compute_object_hash((2, 3)) == compute_object_hash([2, 3])


@pytest.mark.parametrize(
    ("value", "hashed"),
    [
        ("a state", b"str:a state"),
        (2.5, b"number:2.5"),
        ([None, True, 1], b"sequence_start:None:bool:Truenumber:1sequence_end:"),
        ({"b": b"x", "a": np.float32(0.5)}, b"dict_start:str:anp_scalar:0.5str:bbytes:xdict_end:"),
        (np.array([[1, 2]], np.uint8), b"ndarray:uint8(1, 2)\x01\x02"),
    ],
)
def test_a_hash_is_that_of_roll(value: Any, hashed: bytes) -> None:
    assert compute_object_hash(value) == hashlib.sha256(hashed).hexdigest()


def test_a_template_gets_its_fields_and_says_which_it_lacks() -> None:
    assert contains_renderable_field("{turn_idx:>3} of {{9}}", "turn_idx")
    assert contains_renderable_field("{state.x} {state[0]}", "state")
    assert not contains_renderable_field("{{turn_idx}} {turn}", "turn_idx")
    assert rendered("Turn {turn_idx}: \\boxed{{answer}}", {"turn_idx": 2}) == "Turn 2: \\boxed{answer}"
    with pytest.raises(InvalidRequest, match=r"agent_template has \{seed\}, but its fields are observation, turn_idx"):
        rendered("{seed}", {"observation": "o", "turn_idx": 1})
    with pytest.raises(InvalidRequest, match="agent_template cannot be rendered") as caught:
        rendered("an answer in { braces", {})
    assert caught.value.param == "agent_template"


def test_metrics_of_the_steps_become_one_number_each() -> None:
    steps = [{"a": 1, "valid": True}, {"a": 3, "valid": False, "b": np.float32(2)}, {"a": 5, "note": "text"}]
    modes = {"a": "sum", "b": "last"}
    assert aggregate_metrics(steps, modes) == {"a": 9.0, "valid": 0.5, "b": 2.0}
    assert aggregate_metrics(steps, {"a": "mean"})["a"] == 3.0
    found = {mode: aggregate_metrics(steps, {"a": mode})["a"] for mode in ("min", "max", "first", "last", "unknown")}
    assert found == {"min": 1.0, "max": 5.0, "first": 1.0, "last": 5.0, "unknown": 3.0}


def test_what_a_step_without_a_turn_has_earned_belongs_to_the_turn_before() -> None:
    steps = [{"reward": 0.5}, {"interaction_id": "a", "reward": 1.0}, {"reward": 0.25}, {"interaction_id": "b"}]
    assert earned([*steps, {"reward": 2.0}, {"observation": "the last"}]) == ({"a": 1.25, "b": 2.0}, 3.75)


def test_of_answers_of_which_some_are_turns_only_the_turns_are_trained() -> None:
    entries: list[dict[str, Any]] = [
        {"interaction_id": "a", "prompt_ids": [1, 2], "response_ids": [3], "infer_logprobs": [-0.5], "reward": 1.0},
        {"prompt_ids": [4], "response_ids": [5, 6], "reward": 0.5},
        {"interaction_id": "c", "prompt_ids": [7], "response_ids": [8], "infer_logprobs": [-0.25], "reward": 0.25},
        {"interaction_id": "d", "prompt_ids": [9], "response_ids": [10], "reward": 0.0},  # without a logprob
    ]
    history = [{**entry, "messages": []} for entry in entries]
    episode: Any = SimpleNamespace(session=SimpleNamespace(session_id="s"), traj_group_id="g", discount=0.5)
    (whole,) = amended([], history, episode, "concat", [])
    assert whole.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    assert whole.loss_mask.tolist() == [0, 0, 1, 0, 0, 0, 0, 1, 0, 0]
    assert whole.logprobs.tolist() == [0, 0, -0.5, 0, 0, 0, 0, -0.25, 0, 0]
    assert whole.turn_ids.tolist() == [-1, -1, 0, -1, -1, -1, -1, 2, -1, -1]
    assert [turn["span"] for turn in whole.turns] == [[2, 3], [4, 6], [7, 8], [9, 10]]
    steps = amended([], history, episode, "individual", [])
    assert [step.loss_mask.tolist() for step in steps] == [[0, 0, 1], [0, 0, 0], [0, 1], [0, 0]]
    returns = [1.3125, 0.625, 0.25, 0.0]
    assert [turn["return"] for turn in whole.turns] == returns
    assert [sample.reward for sample in (whole, *steps)] == [1.75, *returns]
    assert [float(step.raw_rewards[0]) for step in steps] == [1.0, 0.5, 0.25, 0.0]
    assert {sample.score for sample in (whole, *steps)} == {1.75}


def test_a_step_is_named_after_one_answer_with_its_tokens_and_no_other_step_after_the_same() -> None:
    live = LiveSession(SimpleNamespace(), lambda: None)  # type: ignore[arg-type]
    answers: Any = [SimpleNamespace(id=name, output_ids=ids) for name, ids in (("a", [1]), ("b", [1]), ("c", [2]))]
    live.answers = answers
    history: list[dict[str, Any]] = [{"response_ids": ids} for ids in ((1,), [1], [2], [2], [1])]
    history[3]["interaction_id"] = "c"
    live.name_turns(history)
    assert [entry.get("interaction_id") for entry in history] == ["a", "b", None, "c", None]


def test_a_stop_reason_is_known_by_its_name() -> None:
    assert GenerateStopReason.of("max_length") is GenerateStopReason.MAX_LENGTH
    assert GenerateStopReason.of(SimpleNamespace(name="FINISH")) is GenerateStopReason.FINISH
    with pytest.raises(ValueError, match="'length'; it is one of FINISH, MAX_LENGTH, ABORT"):
        GenerateStopReason.of("length")
