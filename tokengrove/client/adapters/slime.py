"""Samples as the fields of slime's `Sample`, with its routed experts and its kept ids of top-p.

The prompt ends before the first sampled token, and the response has everything after it. Names, shapes and dtypes are
those of `slime/utils/types.py`, `slime/ray/rollout.py` and `slime/backends/megatron_utils/loss.py`, slime 624b824 of
August 2026. slime has no value for a missing row of experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokengrove.client.adapters import parts, replay
from tokengrove.client.adapters.parts import Annotation, group_of, prompt_length, teacher_logprobs
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.values import Sample


def fields(
    samples: Sequence[Sample],
    *,
    on_missing: OnMissing = "refuse",
    vocab_size: int | None = None,
    teacher: str | None = None,
) -> list[dict[str, Any]]:
    """Return the fields of one slime `Sample` per sample, as `Sample.from_dict` takes them. R: tokens of the response.

    `tokens`, `response_length` (R), `reward`, `status`, `weight_versions`; `loss_mask` and `rollout_log_probs`, lists
    of R; `group_index` and `rollout_id`, the numbers of the group and of the session, and `index`, that of the sample.

    `rollout_routed_experts`: int32 [len(tokens) - 1, layers, k]. `rollout_top_p_token_ids` int32 and
    `rollout_top_p_token_offsets` int32 [R + 1]: the kept ids of response token i are `ids[offsets[i]:offsets[i + 1]]`.
    An empty span is a token that slime does not mask: one that is not trained, or a set of all ids. With them,
    `rollout_log_probs` are those within the kept sets.

    `teacher`: the name of a teacher of the export; `teacher_log_probs`, a list of R, has its logprobs, 0 for tokens
    that are not trained. Raises InvalidRequest if a trained token has none.

    A column is in all samples or in none, because slime reads the first sample to know. Raises InvalidRequest if a
    column of one sample lacks a row that a trained token needs; with `on_missing` leave_out, no sample has this column.
    Raises InvalidRequest without `vocab_size`, the number of logits, if a set is stored as the ids that it does not
    have.
    """
    found = base(samples, on_missing, teacher)
    if not replay.has_kept_sets(samples):
        return found
    columns = replay.all_or_none(samples, replay.trained_sets, on_missing)
    for made, sample, sets in zip(found, samples, columns or (), strict=False):
        start = len(made["tokens"]) - made["response_length"]
        ids, sizes = replay.flat_sets(sets[start:], vocab_size)
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)
        made |= {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}
        made["rollout_log_probs"] = replay.sampled_logprobs(sample)[start:].tolist()
    return found


def annotation(samples: Sequence[Sample], rollout_data: Mapping[str, Any]) -> Annotation:
    """Arguments of `client.annotate` from the `rollout_data` of an actor that trains some of these samples.

    Rows are found by `sample_indices`, which are the `index` of `fields`. Streams from lists of [R]: `logprobs`
    (`log_probs`), `ref_logprobs` (`ref_log_probs`), `entropy`, `advantages`. Raises InvalidRequest for an index of no
    sample, and without any of these.
    """
    names = {name: name for name in ("entropy", "advantages")}
    names = {"log_probs": "logprobs", "ref_log_probs": "ref_logprobs", **names}
    ids = range(len(samples)), list(rollout_data["sample_indices"])
    return parts.annotation(samples, rollout_data, names, "response", ids)


def base(samples: Sequence[Sample], on_missing: OnMissing, teacher: str | None = None) -> list[dict[str, Any]]:
    """The fields that slime and Miles share: all but those of kept sets."""
    groups = {name: at for at, name in enumerate(dict.fromkeys(group_of(sample) for sample in samples))}
    sessions = {name: at for at, name in enumerate(dict.fromkeys(sample.session_id for sample in samples))}
    found = [
        {
            "group_index": groups[group_of(sample)],
            "index": at,
            "rollout_id": sessions[sample.session_id],
            **_tokens(sample),
        }
        for at, sample in enumerate(samples)
    ]
    if teacher is not None:
        for made, sample in zip(found, samples, strict=True):
            scores = teacher_logprobs(sample, teacher)
            made["teacher_log_probs"] = scores[len(scores) - made["response_length"] :].tolist()
    if not replay.has_experts(samples):
        return found
    experts = replay.all_or_none(samples, _routed, on_missing)
    for made, rows in zip(found, experts or (), strict=False):
        made["rollout_routed_experts"] = rows
    return found


def _routed(sample: Sample, on_missing: OnMissing) -> Any:
    rows = replay.whole(sample, len(sample.input_ids) - 1, on_missing)
    return None if rows is None else rows.astype(np.int32)


def _tokens(sample: Sample) -> dict[str, Any]:
    start = prompt_length(sample)
    return {
        "tokens": sample.input_ids.tolist(),
        "response_length": len(sample.input_ids) - start,
        "reward": sample.reward,
        "loss_mask": sample.loss_mask[start:].tolist(),
        "rollout_log_probs": sample.logprobs[start:].tolist(),
        "weight_versions": [str(each) for each in dict.fromkeys(sample.versions[sample.loss_mask > 0].tolist())],
        "status": "truncated" if sample.finish_reason == "length" else "completed",
        "session_id": sample.session_id,
    }
