"""The page about vLLM: its table of logprobs follows from the code, and all fields of the code's requests are in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

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


def table(*, processed: bool) -> str:
    """The table of a mode: a row and a column for each field, and what the logprobs of a request with both are of."""
    names = list(FIELDS)
    lines = ["| with | alone | " + " | ".join(f"`{name}`" for name in names) + " |", "|---" * (len(names) + 2) + "|"]
    for row in names:
        cells = [said((row,), processed=processed)]
        for column in names:
            pair = (row, column) if (row, column) in CASES else (column, row)
            cells.append(said(pair, processed=processed) if pair in CASES else "")
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def test_the_tables_of_logprobs_are_those_of_the_code() -> None:
    for processed in (True, False):
        assert table(processed=processed) in PAGE, table(processed=processed)


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
