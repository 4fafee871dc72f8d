"""Routed experts of outputs: those that their sessions recorded, for verl's router replay.

Row t is of the pass that took in id t of prompt and response, so a sampled id depends on the rows before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client import AsyncClient
from tokengrove.client.adapters import replay
from tokengrove.client.adapters.verl import padded_experts
from tokengrove.errors import InvalidRequest
from tokengrove.verl.outputs import AgentLoopOutput


async def add_experts(output: AgentLoopOutput, client: AsyncClient, session_id: str) -> None:
    """Add the experts that the session recorded for the ids of an output: one row for each id.

    An output that has experts keeps them. Raises InvalidRequest if no sample of the session begins with the sampled
    ids of the output, or if a row before the last sampled id was not recorded.
    """
    if output.routed_experts is not None:
        return
    export = await client.export(session_id=session_id, layout="concat", replay=["experts"])
    ids = [*output.prompt_ids, *output.response_ids]
    end = sampled_end(output)
    same = [sample for sample in export.samples if sample.input_ids[:end].tolist() == ids[:end]]
    recorded = [experts for sample in same if (experts := replay.recorded_experts(sample)) is not None]
    if not recorded:
        told = "recorded no routed experts" if same else "has no sample that begins with the ids of the loop"
        raise InvalidRequest(
            f"session {session_id!r} {told}, and actor_rollout_ref.rollout.enable_rollout_routing_replay is true",
            param="enable_rollout_routing_replay",
        )
    rows = max((replay.first_rows(experts[: len(ids)]) for experts in recorded), key=len)
    if len(rows) < max(end - 1, 1):
        raise InvalidRequest(
            f"session {session_id!r} has no routed experts for token {len(rows)}, on which tokens of the response "
            "depend",
            param="enable_rollout_routing_replay",
        )
    output.routed_experts = replay.extended(rows, len(ids))


def sampled_end(output: AgentLoopOutput) -> int:
    """The number of ids of an output up to its last sampled one."""
    sampled = max((at + 1 for at, bit in enumerate(output.response_mask) if bit), default=0)
    return len(output.prompt_ids) + sampled


def columns(outputs: Sequence[AgentLoopOutput], prompt_width: int, width: int) -> dict[str, NDArray[Any]]:
    """`routed_experts` [B, P + R, layers, k] if the outputs have experts; {} if none has. `prompt_width`: P.

    Raises InvalidRequest if only some outputs have experts, and for experts that do not fit the ids of an output.
    """
    given = [output.routed_experts for output in outputs]
    if all(each is None for each in given):
        return {}
    if (lacking := next((row for row, each in enumerate(given) if each is None), None)) is not None:
        message = f"output {lacking} has no 'routed_experts', and others do: verl takes them for all rows or for none"
        raise InvalidRequest(message, param="routed_experts")
    experts = [_checked(output) for output in outputs]
    lengths = [len(output.prompt_ids) for output in outputs]
    return {"routed_experts": padded_experts(experts, lengths, prompt_width, width)}


def _checked(output: AgentLoopOutput) -> NDArray[Any]:
    """The experts of an output, with one row for each id."""
    experts, length = np.asarray(output.routed_experts), len(output.prompt_ids) + len(output.response_ids)
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        message = f"'routed_experts' must be integers [tokens, layers, k], not {experts.dtype} {experts.shape}"
        raise InvalidRequest(message, param="routed_experts")
    least = max(sampled_end(output) - 1, 1)
    if not least <= len(experts):
        message = f"'routed_experts' has {len(experts)} rows, and the sampled ids depend on {least}"
        raise InvalidRequest(message, param="routed_experts")
    return replay.extended(experts[:length], length)
