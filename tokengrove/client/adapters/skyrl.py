"""Samples as SkyRL's `GeneratorOutput`, with the columns of its router replay and its sampler support.

The prompt ends before the first sampled token, and the response has everything after it. Names, shapes, dtypes and fill
values are those of SkyRL 0.4.0: `skyrl/train/generators/base.py`, `skyrl/train/dataset/preprocess.py`,
`skyrl/train/utils/trainer_utils.py`, `skyrl/backends/skyrl_train/utils/sample_support.py` and `routed_experts.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.adapters import parts, replay
from tokengrove.client.adapters.parts import Annotation, prompt_length
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.kept_sets import KeptSets
from tokengrove.client.tensors import Array
from tokengrove.client.values import Float32, Sample


def generator_output(
    samples: Sequence[Sample],
    *,
    on_missing: OnMissing = "refuse",
    vocab_size: int | None = None,
    max_support: int = 1024,
) -> dict[str, Any]:
    """Return the fields of a `GeneratorOutput`, one entry per sample in each list. R is the length of a response.

    `prompt_token_ids`; `response_ids`, `loss_masks` and `rollout_logprobs`, lists of R; `rewards`, one number each;
    `stop_reasons`. `trajectory_ids`, `rollout_metrics` and the fields of step-wise training are None.

    `rollout_expert_indices`: the experts of the first tokens, [rows, layers, k], uint8, int16 or int32. SkyRL runs the
    tokens after them without replay. `rollout_sample_support`: int32 [R, K], the kept set of each token, the sampled
    token first, -1 after the last id; a token without a set is a row of -1, which SkyRL refuses for a trained token. K
    is the size of the largest set of all samples. With it, `rollout_logprobs` are those within the kept sets. Both are
    None if no sample has such a column or, with `on_missing` leave_out, if the column of one sample lacks a row that a
    trained token needs: SkyRL takes a column for all rows of a batch. Otherwise such a sample raises InvalidRequest. So
    does a set of more than `max_support` ids, and a set stored as the ids that it does not have without `vocab_size`,
    the number of logits.
    """
    starts = [prompt_length(sample) for sample in samples]
    support = _support(samples, starts, on_missing, vocab_size, max_support)
    logprobs = [_logprobs(sample, is_kept=support is not None) for sample in samples]
    return {
        "prompt_token_ids": [sample.input_ids[:at].tolist() for sample, at in zip(samples, starts, strict=True)],
        "response_ids": [sample.input_ids[at:].tolist() for sample, at in zip(samples, starts, strict=True)],
        "rewards": [sample.reward for sample in samples],
        "loss_masks": [sample.loss_mask[at:].tolist() for sample, at in zip(samples, starts, strict=True)],
        "stop_reasons": [sample.finish_reason or "stop" for sample in samples],
        "rollout_metrics": None,
        "rollout_logprobs": [values[at:].tolist() for values, at in zip(logprobs, starts, strict=True)],
        "trajectory_ids": None,
        "rollout_expert_indices": _experts(samples, on_missing),
        "rollout_sample_support": support,
        "is_last_step": None,
    }


def annotation(samples: Sequence[Sample], batch: Mapping[str, Any]) -> Annotation:
    """Arguments of `client.annotate` from a `TrainingInputBatch` with one row per sample in their order.

    Streams from [B, R]: `logprobs` (`action_log_probs`), `ref_logprobs` (`base_action_log_probs`), `advantages`. The
    response of a row is where its `response_mask` is 1, on the left or on the right. Rows after the last sample are
    padding. Raises InvalidRequest without any of these.
    """
    names = {"action_log_probs": "logprobs", "base_action_log_probs": "ref_logprobs", "advantages": "advantages"}
    masks = batch["response_mask"]
    rows = {
        column: [row[mask > 0] for row, mask in zip(batch[column], masks, strict=True)]
        for column in names
        if batch.get(column) is not None
    }
    return parts.annotation(samples, rows, names, "response")


def _logprobs(sample: Sample, *, is_kept: bool) -> Float32:
    return replay.sampled_logprobs(sample) if is_kept else sample.logprobs


def _experts(samples: Sequence[Sample], on_missing: OnMissing) -> list[Array] | None:
    if not replay.has_experts(samples):
        return None
    found = replay.all_or_none(samples, replay.captured, on_missing)
    return None if found is None else [each.astype(replay.torch_dtype(found)) for each in found]


def _support(
    samples: Sequence[Sample], starts: Sequence[int], on_missing: OnMissing, vocab_size: int | None, max_support: int
) -> list[NDArray[np.int32]] | None:
    if not replay.has_kept_sets(samples):
        return None
    found = replay.all_or_none(samples, replay.trained_sets, on_missing)
    if found is None:
        return None
    rows = [
        _of_response(sets, sample, start, vocab_size, max_support)
        for sets, sample, start in zip(found, samples, starts, strict=True)
    ]
    width = max(1, *(each.shape[1] for each in rows))
    return [np.pad(each, ((0, 0), (0, width - each.shape[1])), constant_values=-1) for each in rows]


def _of_response(
    sets: KeptSets, sample: Sample, start: int, vocab_size: int | None, max_support: int
) -> NDArray[np.int32]:
    return replay.bounded_sets(sets[start:], sample.input_ids[start:], vocab_size, max_support)
