"""Replay columns go through the trainers' own code and come out as they were recorded."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from tests.conformance.packages import package
from tests.replayed import LAYERS, PER_TOKEN, SETS, VOCABULARY, experts, replayed
from tests.samples import sample
from tokengrove.client import Sample
from tokengrove.client.adapters import skyrl, verifiers, verl

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
ROWS = experts(7)


def short() -> Sample:
    """A sample of one turn, [1, 9] and [2]."""
    kept = {"kept_counts": [0, 0, 3], "kept_ids": [2, 3, 4], "kept_logprobs": [np.nan, np.nan, -1.5]}
    arrays = {name: np.array(values) for name, values in kept.items()}
    return sample([1, 9], [2], session="t", routed_experts=experts(3, [2]), **arrays)


def test_a_branch_of_verifiers_has_the_experts_and_the_sets_of_the_sample() -> None:
    graph, trace = package("verifiers.v1.graph"), package("verifiers.v1.trace")
    nodes = [graph.MessageNode.model_validate(node) for node in verifiers.message_nodes(replayed())]
    again = [graph.MessageNode.model_validate(node.model_dump(mode="python")) for node in nodes]
    for kept in (nodes, again):
        branch = trace.Branch(index=0, nodes=kept)
        assert branch.token_ids == [1, 2, 3, 4, 8, 5, 6]
        assert branch.sampled_mask == [False, False, True, True, False, True, True]
        assert branch.logprobs == [0, 0, -0.5, -0.25, 0, 0, -0.125]
        assert branch.routed_experts.tolist() == np.concatenate([ROWS[:6], ROWS[5:6]]).tolist()
        mask = branch.sampling_mask
        assert mask.counts.tolist() == [len(SETS.get(token, ())) for token in range(7)]
        assert mask.ids.tolist() == [token for kept_ids in SETS.values() for token in kept_ids]


def skyrl_module(name: str) -> Any:
    """A module of SkyRL, which needs Python 3.12."""
    if sys.version_info < (3, 12):
        pytest.skip("SkyRL needs Python 3.12")
    return package(name)


def test_skyrl_accepts_the_columns_and_packs_the_recorded_rows() -> None:
    checks = skyrl_module("skyrl.train.utils.trainer_utils")
    preprocess = skyrl_module("skyrl.train.dataset.preprocess")
    output = skyrl.generator_output([replayed(), short()], vocab_size=VOCABULARY)
    checks._validate_per_token_side_channels(output, step_wise=False)
    *_, routes, support = preprocess.convert_prompts_responses_to_batch_tensors(
        0,
        output["prompt_token_ids"],
        output["response_ids"],
        [[0.0] * len(ids) for ids in output["response_ids"]],
        output["loss_masks"],
        output["rollout_logprobs"],
        rollout_expert_indices=output["rollout_expert_indices"],
        rollout_sample_support=output["rollout_sample_support"],
    )
    assert routes.values.shape == (10, LAYERS, PER_TOKEN)
    assert routes.segment(0)[:6].tolist() == ROWS[:6].tolist()
    assert routes.segment(1)[:2].tolist() == ROWS[:2].tolist()
    assert support.segment(0).tolist() == output["rollout_sample_support"][0].tolist()
    assert support.segment(1).tolist() == [[2, 3, 4]]


def test_verls_own_data_proto_keeps_the_experts_of_its_rows() -> None:
    package("verl.protocol")
    package("tensordict")
    proto: Any = verl.padded([replayed(), short()]).to_data_proto()
    first, second = proto.chunk(2)
    assert first.batch["routed_experts"][0][:6].tolist() == ROWS[:6].tolist()
    assert second.batch["routed_experts"][0][:2].tolist() == ROWS[:2].tolist()
