"""Limits of a request to an engine, and what is left of one that was interrupted."""

from __future__ import annotations

import math

import pytest

from proxy.engine.requests import GenerateRequest, check_request, rest_of
from proxy.prompt_ids import PromptIds
from proxy.types import SamplingParams, ids_of
from tokengrove.errors import InvalidRequest


@pytest.mark.parametrize("field", ["temperature", "repetition_penalty"])
def test_a_parameter_that_is_not_a_number_is_refused_by_name(field: str) -> None:
    sampling = SamplingParams(max_tokens=1, **{field: math.nan})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest) as raised:
        check_request(GenerateRequest("a", PromptIds(ids_of([1])), sampling), vocab_size=8, context_length=8)
    assert raised.value.param == field


@pytest.mark.parametrize("token", [-1, 8])
@pytest.mark.parametrize("at", [0, 499, 500, 999, 1200])
def test_an_id_outside_of_the_vocabulary_is_refused_wherever_it_stands(token: int, at: int) -> None:
    ids, sampling = ids_of([7] * 1201), SamplingParams(max_tokens=1)
    check_request(GenerateRequest("a", PromptIds(ids), sampling), vocab_size=8, context_length=2000)
    ids[at] = token
    with pytest.raises(InvalidRequest) as raised:
        check_request(GenerateRequest("a", PromptIds(ids), sampling), vocab_size=8, context_length=2000)
    assert raised.value.param == "input_ids"


@pytest.mark.parametrize(("sampled", "most", "least"), [(0, 9, 4), (3, 6, 1), (5, 4, 0)])
def test_the_rest_of_an_interrupted_request_counts_what_was_sampled(sampled: int, most: int, least: int) -> None:
    whole = GenerateRequest("a", PromptIds(ids_of([1, 2])), SamplingParams(max_tokens=9, min_tokens=4))
    rest = rest_of(whole, ids_of([7] * sampled))
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (most, least)
    assert rest.input_ids.tolist() == [1, 2] + [7] * sampled


def test_sampling_is_stored_with_its_stop_tokens() -> None:
    for stops in (None, (), (7, 9)):
        sampling = SamplingParams(stop_token_ids=stops, min_tokens=2)
        assert SamplingParams.from_json(sampling.to_json()) == sampling
