"""The page about vLLM: its table of logprobs agrees with the code, and all fields of the code's requests are in it."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from proxy.engine.contract import request_for
from proxy.engine.servers.vllm_wire import generate_body, logprobs_of, sampling_params
from proxy.types import SamplingParams, ids_of
from tests.engines.vllm_fields import CASES, FIELDS

PAGE = (Path(__file__).parents[2] / "docs" / "vllm.md").read_text(encoding="utf-8")


def said(case: tuple[str, ...], *, processed: bool) -> str:
    sampling = SamplingParams()
    for name in case:
        sampling = sampling._replace(**FIELDS[name].sampling)
    return str(logprobs_of(sampling, processed=processed))


def told(*, processed: bool) -> dict[str, str]:
    """What the page tells of the logprobs of each field alone, in a mode."""
    rows = re.findall(r"^\| `([^`|]+)` \| (\w+) \| (\w+) \|$", PAGE, re.M)
    return {name: after if processed else before for name, after, before in rows}


def follows(case: tuple[str, ...], *, processed: bool) -> str:
    """What the page's sentence about several fields makes of their rows."""
    each = {told(processed=processed)[name] for name in case} - {"rule"}
    if not each or (processed and "temperature 0" in case):
        return "rule"
    (other,) = each
    return other


@pytest.mark.parametrize("processed", [True, False])
def test_the_logprobs_of_each_case_follow_from_the_table_and_its_sentence(processed: bool) -> None:
    assert set(told(processed=processed)) == set(FIELDS)
    for case in CASES:
        assert follows(case, processed=processed) == said(case, processed=processed), case


def test_every_field_that_is_sent_is_among_the_served_fields() -> None:
    request = request_for(ids_of([1]), 4)
    sampling = SamplingParams(
        temperature=0.5, max_tokens=4, seed=1, min_tokens=1, logit_bias=((3, 1.0),), presence_penalty=0.1,
        frequency_penalty=0.1, repetition_penalty=1.1,
    )  # fmt: skip
    asked = replace(request, sampling=sampling, stop_token_ids=(7,))
    served = PAGE.split("### Served", 1)[1].split("### Not sent", 1)[0]
    for name in generate_body(asked, sampling_params(asked, {}), 1)["sampling_params"]:
        assert f"`{name}`" in served, name
