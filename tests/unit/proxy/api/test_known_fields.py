"""The error for an unknown field has the field as the client wrote it, and the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from proxy.api.claim_endpoints import parse_claim
from proxy.api.export_request import parse_export
from proxy.api.session_request import parse_start
from tokengrove.errors import InvalidRequest

FILTERS = (
    "group_id, task_id, status, outcome, since, metadata, metrics, rewarded, validation, "
    "purpose, agent, lineage, min_version, max_version_span"
)


@pytest.mark.parametrize(
    ("body", "field", "start", "end"),
    [
        ({"filter": {"grup_id": 1}}, "filter.grup_id", "; did you mean 'filter.group_id'?", FILTERS),
        (
            {"filter": {"filter": {"group_id": "g"}}},
            "filter.filter",
            ": write the fields of 'filter' directly inside it;",
            f"'filter' accepts {FILTERS}",
        ),
        ({"filter": {"zz": 1}}, "filter.zz", ";", f"'filter' accepts {FILTERS}"),
        (
            {"train": {"turn": 1}},
            "train.turn",
            "; did you mean 'train.turns'?",
            "turns, purposes, agents, exclude, constrained, logprobs, max_segments",
        ),
        ({"layot": "tree"}, "layot", "; did you mean 'layout'?", "style"),
    ],
)
def test_an_unknown_field_of_an_export_is_named_with_the_nearest_known_one(
    body: dict[str, Any], field: str, start: str, end: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_export(body)
    assert caught.value.param == field
    assert caught.value.message.startswith(f"'{field}' is unknown{start} ")
    assert caught.value.message.endswith(end)


@pytest.mark.parametrize("parse", [parse_export, parse_claim])
def test_an_unknown_filter_has_the_code_of_every_unknown_field(parse: Callable[[dict[str, Any]], object]) -> None:
    for body in ({"filter": {"grup_id": "g"}}, {"zzz": 1}):
        with pytest.raises(InvalidRequest) as caught:
            parse(body)
        assert caught.value.code == "invalid_request"


def test_an_unknown_field_of_the_export_of_a_claim_has_its_path() -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_claim({"export": {"layot": "tree"}})
    assert caught.value.message.startswith("'export.layot' is unknown; did you mean 'export.layout'? 'export' accepts ")


@pytest.mark.parametrize("body", [{"limits": {"max_turn": 1}}, {"sampling": {"topp": 0.5}}])
def test_an_unknown_limit_or_sampling_field_of_a_session_is_named_with_the_nearest_known_one(
    body: dict[str, Any],
) -> None:
    with pytest.raises(InvalidRequest, match=r"is unknown; did you mean '(limits.max_turns|sampling.top_p)'\?"):
        parse_start({"task_id": "t", **body})
