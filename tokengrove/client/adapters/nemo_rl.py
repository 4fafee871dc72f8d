"""The turns of samples as the token fields of NeMo Gym's output items, with the experts in NeMo-RL's encoding.

NeMo-RL has a value for a missing row: -1 in every entry, for which its trainer uses the model's own router. It has no
field for kept sets. Names, shapes and the encoding are those of `nemo_rl/utils/routed_experts_codec.py`,
`nemo_rl/environments/nemo_gym.py` and `nemo_rl/models/generation/interfaces.py`, NeMo-RL 7ea279a of August 2026.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokengrove.client.adapters import parts, replay
from tokengrove.client.adapters.parts import Annotation
from tokengrove.client.tensors import Array
from tokengrove.client.values import Json, Sample
from tokengrove.errors import InvalidRequest

MISSING = -1
_SIGNED = (np.int8, np.int16, np.int32)


def output_items(sample: Sample) -> list[dict[str, Any]]:
    """Return the token fields of one output item for each turn that a sample trains, in order.

    `prompt_token_ids`: all tokens before the answer. `generation_token_ids` and `generation_log_probs`: those of the
    answer. `routed_experts`, if the export has experts: the experts of all these tokens, [tokens, layers, k], encoded
    by `encoded`. The row of a token that no forward pass took in is -1. NeMo-RL trains the answers of all items, so a
    turn that another sample trains has no item, and its tokens are in the prompt of the next one. Raises InvalidRequest
    for a turn of which the sample trains a part.
    """
    experts = signed(sample)
    return [_item(sample, turn["span"], experts) for turn in sample.turns if _is_trained(sample, turn)]


def annotation(samples: Sequence[Sample], train_data: Mapping[str, Any]) -> Annotation:
    """Arguments of `client.annotate` from the `train_data` of GRPO with one row per sample in their order.

    Streams from [B, L]: `logprobs` (`prev_logprobs`), `ref_logprobs` (`reference_policy_logprobs`), `advantages`.
    Raises InvalidRequest without any of these.
    """
    names = {"prev_logprobs": "logprobs", "reference_policy_logprobs": "ref_logprobs", "advantages": "advantages"}
    return parts.annotation(samples, train_data, names, "tokens")


def signed(sample: Sample) -> Array | None:
    """The experts of a sample, [L, layers, k] in the smallest of int8, int16 and int32, with -1 in missing rows.

    None if the export has no experts for the sample.
    """
    experts = replay.recorded_experts(sample)
    if experts is None:
        return None
    absent = replay.missing_rows(experts)
    largest = int(experts[~absent].max(initial=0))
    dtype = next(each for each in _SIGNED if largest <= np.iinfo(each).max)
    found = experts.astype(dtype)
    found[absent] = MISSING
    return found


def encoded(experts: Array) -> str:
    """Experts [tokens, layers, k], int8, int16 or int32, as `nrlre1:DTYPE:TOKENSxLAYERSxK:BASE64`."""
    shape = "x".join(map(str, experts.shape))
    data = base64.b64encode(np.ascontiguousarray(experts, experts.dtype.newbyteorder("<")).tobytes()).decode()
    return f"nrlre1:{experts.dtype.name}:{shape}:{data}"


def _is_trained(sample: Sample, turn: Mapping[str, Json]) -> bool:
    """Whether a sample trains a turn. Raises InvalidRequest if it trains a part of it."""
    start, end = turn.get("span") or (0, 0)
    mask = sample.loss_mask[start:end] > 0
    if mask.any() and not mask.all():
        raise InvalidRequest(
            f"a sample trains only a part of turn {turn['interaction_id']!r}, and NeMo-RL trains all tokens of an "
            "output item",
            param="samples",
        )
    return bool(mask.any())


def _item(sample: Sample, span: tuple[int, int], experts: Array | None) -> dict[str, Any]:
    start, end = span
    item = {
        "prompt_token_ids": sample.input_ids[:start].tolist(),
        "generation_token_ids": sample.input_ids[start:end].tolist(),
        "generation_log_probs": sample.logprobs[start:end].tolist(),
    }
    return item if experts is None else {**item, "routed_experts": encoded(experts[:end])}
