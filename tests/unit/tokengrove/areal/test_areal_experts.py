"""Experts of a session's turns in AReaL's model responses, branch by branch."""

from __future__ import annotations

import numpy as np
import pytest

from tests.replayed import experts, replayed
from tokengrove.areal import results
from tokengrove.client import Export, Sample, SessionTree, TreeNode
from tokengrove.errors import InvalidRequest

ROWS = experts(7).reshape(7, -1)


def told(sample: Sample) -> Sample:
    """The sample with a question and an answer in each turn."""
    for turn in sample.turns:
        turn["messages"] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    return sample


def tree() -> SessionTree:
    """The two turns of `replayed`, the second of which continues the first."""
    parents = {"s-0": None, "s-1": "s-0"}
    nodes = [
        TreeNode(
            name, parent, True, at, "chat", "continued", "complete", None, None, 0.0, "stop", 2, 2, [[2, 0]], turn=at
        )
        for at, (name, parent) in enumerate(parents.items())
    ]
    return SessionTree("s", "ended", None, None, None, tuple(nodes))


def test_each_turn_has_the_experts_of_its_prompt_and_of_its_output_but_the_last_token() -> None:
    first, second = results.individual(Export([told(replayed())], {}), tree()).values()
    assert first.model_response is not None
    assert second.model_response is not None
    assert first.model_response.routed_experts.tolist() == ROWS[:3].tolist()
    assert second.model_response.routed_experts.tolist() == ROWS[:6].tolist()
    assert second.model_response.routed_experts.dtype == np.int32


def test_a_turn_without_all_of_its_rows_is_refused_or_has_no_experts() -> None:
    export = Export([told(replayed(routed_experts=experts(7, [4, 6])))], {})
    for style in (results.individual, results.concat):
        with pytest.raises(InvalidRequest, match="turn of 7 tokens: token 4 has no row"):
            style(export, tree())
    first, second = results.individual(export, tree(), "leave_out").values()
    assert first.model_response is not None
    assert second.model_response is not None
    assert first.model_response.routed_experts.tolist() == ROWS[:3].tolist()
    assert second.model_response.routed_experts is None
