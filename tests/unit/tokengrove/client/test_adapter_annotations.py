"""Values that trainers compute in their own batches reach the tokens that they are of, through each adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.samples import chain, sample
from tokengrove.client import Sample
from tokengrove.client.adapters import areal, miles, nemo_rl, prime_rl, roll, skyrl, slime, trl, trl_rollout, verl
from tokengrove.client.adapters.parts import Annotation, prompt_length, token_columns
from tokengrove.client.export import Export
from tokengrove.client.tensors import pad_left, pad_right
from tokengrove.client.token_streams import bodies
from tokengrove.errors import InvalidRequest

ORDER = [2, 0, 1, 0]
"""The rows of a trainer that shuffled the samples and filled its batch up with the first."""


def rollouts() -> list[Sample]:
    """Three samples of other lengths, one with a tool result and one with a turn that is not trained."""
    shared = chain([([1], [2]), ([3], [4, 5])], rewards=[0.0, 1.0], session="u", group="g")
    shared.loss_mask[1] = 0
    return [
        chain([([1, 2], [3, 4]), ([8], [5, 6, 7])], rewards=[0.5, 1.0], session="s", group="g"),
        sample([1, 2, 3, 4], [5], session="t", group="h"),
        shared,
    ]


def values_of(samples: Sequence[Sample]) -> list[np.ndarray[Any, Any]]:
    """A value of its own for each token."""
    return [100.0 * (at + 1) + np.arange(len(each.input_ids)) for at, each in enumerate(samples)]


def responses(samples: Sequence[Sample]) -> list[np.ndarray[Any, Any]]:
    return [values[prompt_length(each) :] for values, each in zip(values_of(samples), samples, strict=True)]


def of_verl(samples: Sequence[Sample]) -> Annotation:
    batch = verl.padded(samples, response_length=9)
    columns = {**batch.batch, "old_log_probs": pad_right(responses(samples), np.float32, 0.0, 9)}
    return verl.annotation(samples, shuffled(columns, batch.non_tensor_batch))


def of_roll(samples: Sequence[Sample]) -> Annotation:
    batch = roll.trajectories(samples)
    columns = {**batch.batch, "old_log_probs": pad_right(values_of(samples), np.float32, 0.0)[:, 1:]}
    return roll.annotation(samples, shuffled(columns, batch.non_tensor_batch))


def shuffled(columns: Mapping[str, Any], others: Mapping[str, Any]) -> SimpleNamespace:
    return SimpleNamespace(
        batch={name: column[ORDER] for name, column in columns.items()},
        non_tensor_batch={name: column[ORDER] for name, column in others.items()},
    )


def of_slime(samples: Sequence[Sample]) -> Annotation:
    fields, rows = slime.fields(samples), responses(samples)
    data = {"sample_indices": [fields[at]["index"] for at in ORDER], "log_probs": [rows[at] for at in ORDER]}
    assert miles.annotation is slime.annotation
    return slime.annotation(samples, data)


def of_areal(samples: Sequence[Sample]) -> Annotation:
    rows = pad_right(values_of(samples), np.float32, 0.0)
    return areal.annotation(samples, {"prox_logp": np.roll(rows, -1, axis=1), "kl_rewards": rows})


def of_skyrl(samples: Sequence[Sample]) -> Annotation:
    rows = [*responses(samples), np.zeros(2)]  # the last fills up the batch
    masks = pad_left([np.ones(len(row)) for row in rows], np.int64, 0)
    return skyrl.annotation(samples, {"action_log_probs": pad_left(rows, np.float32, 0.0), "response_mask": masks})


def of_nemo_rl(samples: Sequence[Sample]) -> Annotation:
    return nemo_rl.annotation(samples, {"prev_logprobs": pad_right(values_of(samples), np.float32, 0.0)})


def of_prime_rl(samples: Sequence[Sample]) -> Annotation:
    return prime_rl.annotation(samples, {"trainer_logprobs": values_of(samples)})


def of_trl(samples: Sequence[Sample]) -> Annotation:
    own = [samples[at] for at in (0, 2, 1)]  # group by group
    rows = pad_right([values_of(samples)[at] for at in (0, 2, 1)], np.float32, 0.0)
    found = trl.annotation(samples, {"log_probs": rows[:, 1:]})
    assert [each.session_id for each in found["samples"]] == [each.session_id for each in own]
    return found


def of_trl_rollout(samples: Sequence[Sample]) -> Annotation:
    return trl_rollout.annotation(samples, {"old_per_token_logps": pad_right(responses(samples), np.float32, 0.0)})


BATCHES = (*(of_verl, of_roll, of_slime, of_areal, of_skyrl, of_nemo_rl, of_prime_rl, of_trl, of_trl_rollout),)


def told(found: Annotation) -> dict[str, list[float]]:
    """The logprobs of each turn that would be sent."""
    sent: dict[str, list[float]] = {}
    for body in bodies(found["samples"], 1, "t", found["streams"], {}, found["align"]):
        for entry in body["samples"]:
            for turn in entry["turns"]:
                start, end = turn["span"]
                sent.setdefault(turn["interaction_id"], []).extend(entry["streams"]["logprobs"][start:end])
    return sent


@pytest.mark.parametrize("convert", BATCHES, ids=lambda convert: convert.__name__[3:])
def test_each_trained_token_gets_the_value_of_the_trainers_batch(
    convert: Callable[[Sequence[Sample]], Annotation],
) -> None:
    samples = rollouts()
    expected = {
        turn["interaction_id"]: values[slice(*turn["span"])].tolist()
        for values, each in zip(values_of(samples), samples, strict=True)
        for turn in each.turns
        if each.loss_mask[turn["span"][0]]
    }
    assert told(convert(samples)) == expected
    assert len(expected) == 4


def test_tokens_that_verl_cut_off_have_no_values() -> None:
    samples = rollouts()
    batch = verl.padded(samples, response_length=3, on_too_long="truncate")
    batch.batch["old_log_probs"] = pad_right([row[:3] for row in responses(samples)], np.float32, 0.0)
    found = told(verl.annotation(samples, batch))
    assert {name: len(values) for name, values in found.items()} == {"s-0": 2, "t-0": 1, "u-1": 1}


def test_tokens_that_verl_rejected_are_masked() -> None:
    samples = rollouts()[1:2]
    batch = verl.padded(samples)
    batch.batch["response_mask"][:] = 0
    found = verl.annotation(samples, batch)
    assert [row.tolist() for row in found["streams"]["is_masked"]] == [[True]]


def test_a_row_of_another_sample_and_a_batch_without_values_are_refused() -> None:
    samples = rollouts()
    batch = verl.padded(samples)
    with pytest.raises(InvalidRequest, match="not among the samples"):
        verl.annotation(samples[1:], batch)
    with pytest.raises(InvalidRequest, match="none of prev_logprobs"):
        nemo_rl.annotation(samples, {"logprobs": []})
    with pytest.raises(InvalidRequest, match="'logprobs' has 1 rows, and there are 3 samples"):
        nemo_rl.annotation(samples, {"prev_logprobs": [np.zeros(9)]})


def test_the_samplers_own_logprobs_are_not_told_as_the_trainers() -> None:
    rows = np.zeros((3, 9), np.float32)
    batch = {"sampling_per_token_logps": rows, "old_per_token_logps": rows}
    with pytest.raises(InvalidRequest, match="the batch has none of"):
        trl_rollout.annotation(rollouts(), batch)
    found = trl_rollout.annotation(rollouts(), {**batch, "per_token_logps": rows + 1})
    assert found["streams"]["logprobs"][0].tolist() == [1.0] * 9


def test_a_trained_first_token_has_no_value_in_shifted_rows() -> None:
    first = sample([], [5, 6])
    found = areal.annotation([first], {"prox_logp": np.zeros((1, 2))})
    with pytest.raises(InvalidRequest, match="no value for the first token"):
        told(found)


NAMES = [
    (areal, {"prox_logp": "logprobs", "ref_logp": "ref_logprobs", "advantages": "advantages"}),
    (nemo_rl, {"prev_logprobs": "logprobs", "reference_policy_logprobs": "ref_logprobs", "advantages": "advantages"}),
    (
        prime_rl,
        {
            **{"trainer_logprobs": "logprobs", "entropy": "entropy", "is_masked": "is_masked"},
            "importance_ratio": "importance_weight",
        },
    ),
    (skyrl, {"action_log_probs": "logprobs", "base_action_log_probs": "ref_logprobs", "advantages": "advantages"}),
    (
        slime,
        {
            **{name: name for name in ("entropy", "advantages")},
            "log_probs": "logprobs",
            "ref_log_probs": "ref_logprobs",
        },
    ),
    (trl, {"log_probs": "logprobs", "entropies": "entropy", "importance_sampling_ratio": "importance_weight"}),
    (
        trl_rollout,
        {
            **{"per_token_logps": "logprobs", "ref_per_token_logps": "ref_logprobs", "entropies": "entropy"},
            "importance_sampling_ratio": "importance_weight",
        },
    ),
    (roll, {"old_log_probs": "logprobs", "ref_log_probs": "ref_logprobs", "advantages": "advantages"}),
    (
        verl,
        {
            **{"old_log_probs": "logprobs", "entropys": "entropy", "ref_log_prob": "ref_logprobs"},
            **{"advantages": "advantages", "rollout_is_weights": "importance_weight"},
        },
    ),
]


@pytest.mark.parametrize(("adapter", "names"), NAMES, ids=[each[0].__name__.rpartition(".")[2] for each in NAMES])
def test_each_column_of_a_trainer_is_the_stream_of_its_name(adapter: Any, names: dict[str, str]) -> None:
    one = sample([1, 2], [5, 6])
    columns: dict[str, Any] = {name: np.full((1, 4), at + 1.0) for at, name in enumerate(names)}
    batch: Any = {**columns, "response_mask": np.ones((1, 4)), "sample_indices": [0]}
    if adapter in (roll, verl):
        ids = {"interaction_id": np.array([one.interaction_id])}
        batch = SimpleNamespace(batch={**columns, "responses": np.zeros((1, 4))}, non_tensor_batch=ids)
    streams = adapter.annotation([one], batch)["streams"]
    found = {name: float(rows[0][0]) for name, rows in streams.items()}
    assert found == {stream: at + 1.0 for at, stream in enumerate(names.values())}


def test_a_batch_that_is_one_row_short_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="'logprobs' has 2 rows, and there are 3 samples"):
        nemo_rl.annotation(rollouts(), {"prev_logprobs": np.zeros((2, 9))})


def test_trl_has_no_row_of_a_sample_without_trained_tokens() -> None:
    samples = rollouts()
    samples[0].loss_mask[:] = 0
    rows = [np.zeros(9), np.ones(9)]
    found = trl.annotation(samples, {"log_probs": rows})
    assert [each.session_id for each in found["samples"]] == ["u", "t"]
    assert len(found["streams"]["logprobs"]) == 2


def test_advantages_of_turns_are_on_their_tokens() -> None:
    one, other = rollouts()[0], rollouts()[1]
    one.extra["turn_advantages"] = np.array([0.5, -1.0], np.float32)  # type: ignore[index]
    found = token_columns([one, other])["turn_advantages"]
    assert [row.tolist() for row in found] == [[0, 0, 0.5, 0.5, 0, -1, -1, -1], [0] * 5]


def test_the_counts_of_a_forest_are_added_over_pages() -> None:
    whole = Export([], {}, forest={"rows": 1, "unmerged_tokens": {"sampled": 2}})
    whole.extend(Export([], {}, forest={"rows": 2, "unmerged_tokens": {"sampled": 3, "images": 1}}))
    assert whole.forest == {"rows": 3, "unmerged_tokens": {"sampled": 5, "images": 1}}
