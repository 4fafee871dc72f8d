"""Samples as the message nodes of a verifiers trace, with their routed experts and their sampling masks.

The path of the nodes is one branch: their tokens, joined, are those of the sample. Names, shapes and dtypes are those
of verifiers 0.4.0: `verifiers/v1/graph.py`, `verifiers/v1/trace.py` and `verifiers/v1/types.py`. prime-rl's
orchestrator reads such traces; `prime_rl` makes the samples of its trainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from tokengrove.client.adapters import replay
from tokengrove.client.adapters.parts import teacher_logprobs
from tokengrove.client.adapters.replay import OnMissing
from tokengrove.client.kept_sets import KeptSets
from tokengrove.client.tensors import Array
from tokengrove.client.values import Float32, Json, Sample

_UNTOLD = {"user": {"role": "user", "content": ""}, "assistant": {"role": "assistant", "content": ""}}
"""The messages of an export without messages."""


def message_nodes(
    sample: Sample,
    *,
    on_missing: OnMissing = "refuse",
    vocab_size: int | None = None,
    teacher: str | None = None,
) -> list[dict[str, Any]]:
    """Return the fields of verifiers' `MessageNode`s, as `MessageNode.model_validate` takes them, parents first.

    Each turn has a node for each of its new messages, the last of which has the tokens before the answer, and one for
    its answer. Messages are empty unless the export included them. `mask` is True for trained tokens, and `logprobs`
    has one value for each of these. Tokens after the last answer are in a node of their own.

    `routed_experts`: [tokens of the node, layers, k], uint8, int16 or int32, in all nodes with tokens; the row of the
    last token, which no forward pass took in, repeats the one before it, as in verifiers. `sampling_mask`: `ids` int32
    and `counts` int32 of the trained tokens, in the encoding of verifiers' wire; count 0: no restriction. With it,
    `logprobs` are those within the kept sets.

    Raises InvalidRequest if a column lacks a row that a trained token needs; with `on_missing` leave_out, no node has
    it. Raises InvalidRequest without `vocab_size`, the number of logits, if a set is stored as the ids that it does not
    have.

    `teacher`: the name of a teacher of the export; `reference_logprobs` of a node has its logprobs, one for each
    trained token. Raises InvalidRequest if a trained token has none.
    """
    scores = None if teacher is None else teacher_logprobs(sample, teacher)
    experts = replay.whole(sample, len(sample.input_ids), on_missing) if replay.has_experts([sample]) else None
    if experts is not None:
        experts = experts.astype(replay.torch_dtype([experts]))
    sets = replay.trained_sets(sample, on_missing) if replay.has_kept_sets([sample]) else None
    logprobs = sample.logprobs if sets is None else replay.sampled_logprobs(sample)
    nodes = []
    for number, (message, sampled, part) in enumerate(_parts(sample)):
        node = {"parent": number - 1 if number else None, "message": message, "sampled": sampled}
        nodes.append(node | _tokens(sample, part, logprobs, experts, sets, vocab_size) | _scores(sample, part, scores))
    return nodes


def _parts(sample: Sample) -> Iterator[tuple[Json, bool, slice]]:
    """Yield the message of each node, whether it was sampled, and its tokens."""
    end = 0
    for turn in sample.turns:
        *asked, answer = turn.get("messages") or _UNTOLD.values()
        start, stop = turn["span"] or (end, end)
        for message in asked[:-1]:
            yield message, False, slice(end, end)
        for message in asked[-1:] or ([_UNTOLD["user"]] if start > end else []):
            yield message, False, slice(end, start)
        yield answer, True, slice(start, stop)
        end = stop
    if end < len(sample.input_ids):
        yield _UNTOLD["user"], False, slice(end, len(sample.input_ids))


def _tokens(
    sample: Sample,
    part: slice,
    logprobs: Float32,
    experts: Array | None,
    sets: KeptSets | None,
    vocab_size: int | None,
) -> dict[str, Any]:
    mask = sample.loss_mask[part] > 0
    found = {
        "token_ids": sample.input_ids[part].tolist(),
        "mask": mask.tolist(),
        "logprobs": logprobs[part][mask].tolist(),
    }
    if experts is not None and part.stop > part.start:
        found["routed_experts"] = experts[part]
    if sets is not None and mask.any():
        ids, sizes = replay.flat_sets(sets[part], vocab_size)
        kept = np.repeat(mask, sizes)
        found["sampling_mask"] = {"ids": _encoded(ids[kept]), "counts": _encoded(sizes[mask])}
    return found


def _scores(sample: Sample, part: slice, scores: Float32 | None) -> dict[str, Any]:
    """The scores of a teacher of the trained tokens of a node; nothing without any."""
    mask = sample.loss_mask[part] > 0
    return {} if scores is None or not mask.any() else {"reference_logprobs": scores[part][mask].tolist()}


def _encoded(values: Array) -> dict[str, Any]:
    return {"__nd__": True, "dtype": values.dtype.name, "shape": list(values.shape), "data": values.tobytes()}
