"""Experts that sessions recorded reach verl's outputs and batches: a row for each id, or a refusal by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pytest

from tests.replayed import LAYERS, PER_TOKEN, experts, replayed, two_turns
from tokengrove.client import AsyncClient, Export, Sample
from tokengrove.errors import InvalidRequest
from tokengrove.rollout.config import Config
from tokengrove.verl import AgentLoopOutput
from tokengrove.verl.batches import padded_outputs
from tokengrove.verl.experts import add_experts
from tokengrove.verl.sample_run import LoopOptions, SampleRun
from tokengrove.verl.settings import trainer_config

ROWS = experts(7)


@dataclass
class Recorded:
    """A client whose sessions have these samples."""

    samples: list[Sample]

    async def export(self, **_: Any) -> Export:
        return Export(self.samples, {})


def output(**more: Any) -> AgentLoopOutput:
    """What a loop returns for the ids of `two_turns`."""
    given = {"prompt_ids": [1, 2], "response_ids": [3, 4, 8, 5, 6], "response_mask": [1, 1, 0, 1, 1], **more}
    return AgentLoopOutput(**given)


async def added(made: AgentLoopOutput, *samples: Sample) -> AgentLoopOutput:
    await add_experts(made, cast(AsyncClient, Recorded(list(samples))), "s")
    return made


async def test_an_output_gets_the_recorded_experts_of_all_its_ids() -> None:
    made = await added(output(), replayed())
    assert made.routed_experts.tolist() == np.concatenate([ROWS[:6], ROWS[5:6]]).tolist()


async def test_an_output_that_ends_within_its_session_gets_the_rows_of_its_own_ids() -> None:
    short = await added(output(response_ids=[3, 4], response_mask=[1, 1]), replayed())
    assert short.routed_experts.tolist() == ROWS[:4].tolist()


async def test_ids_after_the_last_sampled_one_need_no_recorded_row() -> None:
    longer = output(response_ids=[3, 4, 8, 5, 6, 9, 9], response_mask=[1, 1, 0, 1, 1, 0, 0])
    made = await added(longer, replayed())
    assert made.routed_experts.shape == (9, LAYERS, PER_TOKEN)
    assert made.routed_experts[:6].tolist() == ROWS[:6].tolist()


async def test_of_several_samples_with_the_ids_the_one_with_more_rows_counts() -> None:
    broken = replayed(routed_experts=experts(7, [3, 6]))
    made = await added(output(), two_turns(), broken, replayed())
    assert made.routed_experts[:6].tolist() == ROWS[:6].tolist()


async def test_experts_that_a_loop_returned_are_kept() -> None:
    own = ROWS + 1
    assert (await added(output(routed_experts=own))).routed_experts is own


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "has no sample that begins with the ids of the loop"),
        ([two_turns()], "recorded no routed experts"),
        ([replayed(routed_experts=experts(7, [4, 6]))], "no routed experts for token 4"),
    ],
)
async def test_experts_that_were_not_recorded_are_refused(samples: list[Sample], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        await added(output(), *samples)


def batch_of(*outputs: AgentLoopOutput) -> dict[str, Any]:
    return padded_outputs(outputs, {}, prompt_length=3, response_length=6, pad_token_id=0).batch


def test_a_batch_of_outputs_has_verls_routed_experts() -> None:
    batch = batch_of(output(routed_experts=ROWS[:6]), output(routed_experts=ROWS.astype(np.int32)))
    found = batch["routed_experts"]
    assert (found.dtype, found.shape) == (np.dtype(np.uint8), (2, 9, LAYERS, PER_TOKEN))
    assert found[0, 1:8].tolist() == np.concatenate([ROWS[:6], ROWS[5:6]]).tolist()
    assert found[1, 1:8].tolist() == ROWS.tolist()
    assert not found[batch["attention_mask"] == 0].any()
    assert "routed_experts" not in batch_of(output())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ROWS[:5], "has 5 rows, and the sampled ids depend on 6"),
        (ROWS.reshape(7, -1), r"must be integers \[tokens, layers, k\]"),
        (ROWS.astype(np.float32), "not float32"),
    ],
)
def test_experts_of_a_loop_that_do_not_fit_its_ids_are_refused(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        batch_of(output(routed_experts=given))


def test_experts_of_some_outputs_only_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="output 1 has no 'routed_experts', and others do"):
        batch_of(output(routed_experts=ROWS), output())


@pytest.mark.parametrize("is_on", [True, False])
def test_verls_own_switch_makes_sessions_record_experts(is_on: bool) -> None:
    rollout = {"enable_rollout_routing_replay": is_on}
    config: Config = trainer_config({"actor_rollout_ref": {"rollout": rollout}})
    run = SampleRun(LoopOptions(config), 0, {}, {}, {"sample_index": 0}, None, 1)
    assert run._session_options().get("replay") == (["experts"] if is_on else None)
