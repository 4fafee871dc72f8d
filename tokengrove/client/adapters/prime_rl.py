"""Samples as the fields of prime-rl's `TrainingSample`, with its `RoutedExperts` and its `SamplingMask`.

Every list has one entry per token, prompt included. Names, shapes and dtypes are those of prime-rl's
`transports/rollouts/types.py` (559b447, August 2026) and of its later `transports/batch/types.py`, which has the mask,
and of `orchestrator/trajectories.py`, `trainer/batch.py` and `trainer/rl/data.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokengrove.client.adapters import parts, replay
from tokengrove.client.adapters.parts import Annotation, teacher_logprobs
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.values import Sample


def training_samples(
    samples: Sequence[Sample],
    *,
    env_name: str = "",
    on_missing: OnMissing = "refuse",
    vocab_size: int | None = None,
    types: Any = None,
    teacher: str | None = None,
) -> list[Any]:
    """Return the fields of one `TrainingSample` per sample, or with `types` the structs. L: tokens of a sample.

    `types`: prime-rl's module with `TrainingSample`, `RoutedExperts` and `SamplingMask`.

    `token_ids`, `mask`, `logprobs`, `temperatures` (those of the turns; 1 outside of them) and `advantages` (None
    without advantages in the export): lists of L. `routed_experts`: `data`, the bytes of [L, layers, k], `shape` and
    `dtype` (uint8, int16 or int32); no trained token depends on its last row, which repeats the one before it, as in
    verifiers. `sampling_mask`: `ids`, the bytes of int32, and `counts`, the bytes of int32 [L]: the sizes of the kept
    sets, 0 for a token without a restriction. With it, `logprobs` are those within the kept sets.

    Raises InvalidRequest if a column lacks a row that a trained token needs; with `on_missing` leave_out, it is None in
    this sample. Both are None in all samples if no sample has such a column. Raises InvalidRequest without
    `vocab_size`, the number of logits, if a set is stored as the ids that it does not have.

    `teacher`: the name of a teacher of the export; `ref_logprobs`, a list of L, has its logprobs, 0 for tokens that are
    not trained. Raises InvalidRequest if a trained token has none.
    """
    experts = _experts(samples, on_missing)
    masks = _masks(samples, on_missing, vocab_size)
    made = []
    for sample, rows, mask in zip(samples, experts, masks, strict=True):
        columns = {"routed_experts": rows, "sampling_mask": mask}
        if types is not None:
            kinds = {"routed_experts": "RoutedExperts", "sampling_mask": "SamplingMask"}
            columns = {name: value and getattr(types, kinds[name])(**value) for name, value in columns.items()}
        fields = {**_tokens(sample, is_kept=mask is not None), "env_name": env_name, **columns}
        if teacher is not None:
            fields["ref_logprobs"] = teacher_logprobs(sample, teacher).tolist()
        made.append(fields if types is None else types.TrainingSample(**fields))
    return made


def annotation(samples: Sequence[Sample], rows: Mapping[str, Sequence[Any]]) -> Annotation:
    """Arguments of `client.annotate` from values of prime-rl's trainer, one row of L per sample in their order.

    prime-rl packs samples into one row, so cut it at their lengths first. Streams: `logprobs` (`trainer_logprobs`),
    `entropy`, `is_masked`, `importance_weight` (`importance_ratio`). Raises InvalidRequest without any of these.
    """
    names = {name: name for name in ("entropy", "is_masked")}
    names = {"trainer_logprobs": "logprobs", "importance_ratio": "importance_weight", **names}
    return parts.annotation(samples, rows, names, "tokens")


def _tokens(sample: Sample, *, is_kept: bool) -> dict[str, Any]:
    logprobs, trained = replay.sampled_logprobs(sample) if is_kept else sample.logprobs, sample.loss_mask > 0
    of_turns = [(turn.get("sampling") or {}).get("temperature", 1.0) for turn in sample.turns]
    temperatures = np.array([*of_turns, 1.0], np.float32)[sample.turn_ids]
    advantages = None if sample.advantage is None else np.where(trained, np.float32(sample.advantage), 0.0).tolist()
    return {
        "token_ids": sample.input_ids.tolist(),
        "mask": trained.tolist(),
        "logprobs": logprobs.tolist(),
        "temperatures": temperatures.tolist(),
        "advantages": advantages,
    }


def _experts(samples: Sequence[Sample], on_missing: OnMissing) -> list[dict[str, Any] | None]:
    if not replay.has_experts(samples):
        return [None] * len(samples)
    found = [replay.whole(sample, len(sample.input_ids), on_missing) for sample in samples]
    # prime-rl packs samples into one array, so all of a batch have one dtype
    dtype = replay.torch_dtype([each for each in found if each is not None])
    arrays = [None if each is None else np.ascontiguousarray(each, dtype) for each in found]
    return [
        None if each is None else {"data": each.tobytes(), "shape": list(each.shape), "dtype": each.dtype.name}
        for each in arrays
    ]


def _masks(samples: Sequence[Sample], on_missing: OnMissing, vocab_size: int | None) -> list[dict[str, bytes] | None]:
    if not replay.has_kept_sets(samples):
        return [None] * len(samples)
    sets = [replay.trained_sets(sample, on_missing) for sample in samples]
    flat = [None if each is None else replay.flat_sets(each, vocab_size) for each in sets]
    return [None if each is None else {"ids": each[0].tobytes(), "counts": each[1].tobytes()} for each in flat]
