"""Samples as the fields of Miles's `Sample`, with its routed experts and its sampling mask.

Like slime's, but for the mask, which has an id for every token of the response. Names, shapes and dtypes are those of
`miles/utils/types.py` (31f1ca9, August 2026) and of `miles/utils/sampling_mask.py` and
`miles/rollout/generate_utils/sampling_mask.py` (8c8d1c4 and 067dc32).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tokengrove.client.adapters import replay, slime
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.adapters.slime import annotation
from tokengrove.client.kept_sets import KeptSets
from tokengrove.client.tensors import Array
from tokengrove.client.values import Sample

__all__ = ["annotation", "fields"]


def fields(
    samples: Sequence[Sample],
    *,
    on_missing: OnMissing = "refuse",
    vocab_size: int | None = None,
    teacher: str | None = None,
) -> list[dict[str, Any]]:
    """Return the fields of one Miles `Sample` per sample. R: tokens of the response.

    As `slime.fields`, without `rollout_id` and `session_id`, which Miles does not have, and with
    `rollout_sampling_mask` in place of the kept ids of top-p: `ids` int32 and `offsets` int64 [R + 1], the arguments of
    `RolloutSamplingMask`. A token of the response without a recorded set is one that is not trained: its set is the
    token itself, as Miles has it for tokens of the environment. Raises InvalidRequest as `slime.fields`, and without
    `vocab_size` for a set of all ids.
    """
    found = slime.base(samples, on_missing, teacher)
    for made in found:
        del made["rollout_id"], made["session_id"]
    if not replay.has_kept_sets(samples):
        return found
    columns = replay.all_or_none(samples, replay.trained_sets, on_missing)
    for made, sample, sets in zip(found, samples, columns or (), strict=False):
        start = len(made["tokens"]) - made["response_length"]
        made["rollout_sampling_mask"] = _mask(sets[start:], sample.input_ids[start:], vocab_size)
        made["rollout_log_probs"] = replay.sampled_logprobs(sample)[start:].tolist()
    return found


def _mask(sets: KeptSets, tokens: Array, vocab_size: int | None) -> dict[str, Array]:
    ids, sizes = replay.flat_sets(sets, vocab_size, list_all=True)
    starts = np.cumsum(sizes) - sizes
    alone = sizes == 0
    return {
        "ids": np.insert(ids, starts[alone], tokens[alone]).astype(np.int32),
        "offsets": np.concatenate([[0], np.cumsum(np.maximum(sizes, 1))]).astype(np.int64),
    }
