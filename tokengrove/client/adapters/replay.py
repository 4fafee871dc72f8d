"""Replay columns of samples in the forms that trainers take: experts by token, and kept sets by sampled token.

Row t of the experts is of the pass that took in token t, so a trained token depends on the rows before it. A row that a
trained token depends on is what was recorded, or the sample is refused or left out. Only rows after those may be
filled, with the row before them: the experts of a real token, never zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.kept_sets import KeptSets, Mask
from tokengrove.client.tensors import Array
from tokengrove.client.values import Float32, Sample
from tokengrove.errors import InvalidRequest
from tokengrove.rows_beside import missing_value

OnMissing = Literal["refuse", "leave_out"]
"""What happens to a sample whose column lacks a row that a trained token needs: InvalidRequest, or no column."""

_EXPERTS = "routed_experts"
_KEPT = "kept sets"
_Column = TypeVar("_Column")


def kept_sets(sample: Sample) -> KeptSets | None:
    """The kept sets of the L tokens of a sample; None if the export has none for it."""
    counts, ids = sample.extra.get("kept_counts"), sample.extra.get("kept_ids")
    return None if counts is None or ids is None else KeptSets(counts, ids)


def recorded_experts(sample: Sample) -> Array | None:
    """The experts of a sample as exported: [L, layers, k] with missing rows; None if the export has none for it."""
    found: Array | None = sample.extra.get(_EXPERTS)
    return found


def has_experts(samples: Sequence[Sample]) -> bool:
    """Whether the export has experts for any of the samples."""
    return any(recorded_experts(sample) is not None for sample in samples)


def has_kept_sets(samples: Sequence[Sample]) -> bool:
    """Whether the export has kept sets for any of the samples."""
    return any(kept_sets(sample) is not None for sample in samples)


def missing_rows(experts: Array) -> Mask:
    """Which tokens have no experts, bool [L]."""
    blank = missing_value(experts.dtype)
    return np.asarray((experts == blank).reshape(len(experts), -1).all(axis=1)) if experts.size else np.zeros(0, bool)


def needed_rows(sample: Sample) -> int:
    """The number of rows of experts that the trained tokens of a sample depend on: the rows before the last of them."""
    trained = np.flatnonzero(sample.loss_mask)
    return int(trained[-1]) if len(trained) else 0


def first_rows(experts: Array) -> Array:
    """The rows of experts before the first missing one."""
    absent = np.flatnonzero(missing_rows(experts))
    return experts[: absent[0]] if len(absent) else experts


def extended(experts: Array, rows: int) -> Array:
    """Experts of `rows` tokens: those that are given, at least one, and then the last of them again."""
    return np.concatenate([experts[:rows], np.repeat(experts[-1:], max(rows - len(experts), 0), axis=0)])


def captured(sample: Sample, on_missing: OnMissing = "refuse") -> Array | None:
    """The experts of the first tokens of a sample, up to its first missing row: [rows, layers, k], at least one row.

    All rows that a trained token depends on are there; else InvalidRequest, or None with `leave_out`.
    """
    experts = recorded_experts(sample)
    if experts is None:
        _refuse(sample, _EXPERTS, "it has no such column", on_missing)
        return None
    found, least = first_rows(experts), max(needed_rows(sample), 1)
    if len(found) < least:
        count = int(missing_rows(experts[:least]).sum())
        _refuse(sample, _EXPERTS, f"token {len(found)} has no row, the first of {count}", on_missing)
        return None
    return found


def whole(sample: Sample, rows: int, on_missing: OnMissing = "refuse") -> Array | None:
    """The experts of the first `rows` tokens of a sample: [rows, layers, k], as `captured`.

    Rows after those that were captured repeat the last one, because a trainer that takes one row for each token runs
    them; no trained token depends on them.
    """
    found = captured(sample, on_missing)
    return None if found is None else extended(found, rows)


def all_or_none(
    samples: Sequence[Sample], column: Callable[[Sample, OnMissing], _Column | None], on_missing: OnMissing
) -> list[_Column] | None:
    """The column of each sample, for trainers that take a column for all samples of a batch or for none.

    With `leave_out`, None if one sample has no column.
    """
    found = [column(sample, on_missing) for sample in samples]
    columns = [each for each in found if each is not None]
    return columns if len(columns) == len(found) and columns else None


def torch_dtype(experts: Sequence[Array]) -> type[np.generic]:
    """The smallest of uint8, int16 and int32 that holds the expert ids: torch has little use for uint16."""
    largest = max((int(each.max(initial=0)) for each in experts), default=0)
    return np.uint8 if largest < 1 << 8 else np.int16 if largest < 1 << 15 else np.int32


def trained_sets(sample: Sample, on_missing: OnMissing = "refuse") -> KeptSets | None:
    """The kept sets of a sample, of which each trained token has one.

    Otherwise InvalidRequest, or None with `leave_out`. Raises InvalidRequest if the set of a sampled token does not
    contain it, because such sets are those of other tokens.
    """
    sets = kept_sets(sample)
    if sets is None:
        _refuse(sample, _KEPT, "it has no such column", on_missing)
        return None
    absent = np.flatnonzero(sets.missing & (sample.loss_mask > 0))
    if len(absent):
        why = f"trained token {absent[0]} has none, the first of {len(absent)}"
        _refuse(sample, _KEPT, why, on_missing)
        return None
    if (outside := ~sets.missing & ~sets.contain(sample.input_ids)).any():
        message = f"the kept set of token {int(outside.argmax())} of sample {sample.interaction_id!r} does not have it"
        raise InvalidRequest(message, param="samples")
    return sets


def sampled_logprobs(sample: Sample) -> Float32:
    """The logprobs of the distribution that the kept sets restrict, float32 [L]; 0 where the loss mask is 0.

    They belong to the kept sets: a trainer that restricts its logits compares its logprobs with these. Raises
    InvalidRequest if a trained token has none.
    """
    sets, kept = kept_sets(sample), sample.extra.get("kept_logprobs")
    if sets is None or kept is None:
        raise InvalidRequest(f"sample {sample.interaction_id!r} has no kept sets with logprobs", param="samples")
    trained = sample.loss_mask > 0
    same = sets.unrestricted | _sampled_turns(sample)
    found = np.where(np.isnan(kept) & same, sample.logprobs, kept)
    if np.isnan(found[trained]).any():
        first = int(np.flatnonzero(np.isnan(found) & trained)[0])
        message = f"trained token {first} of sample {sample.interaction_id!r} has no logprob within its kept set"
        raise InvalidRequest(message, param="samples")
    return np.where(trained, found, np.float32(0.0)).astype(np.float32)


def flat_sets(sets: KeptSets, vocab_size: int | None, *, list_all: bool = False) -> tuple[Array, Array]:
    """The ids of all sets int32, one set after another in ascending order, and the size of each, int32 [L].

    A missing set has size 0. So has a set of all ids, which trainers read as a token without a restriction, unless
    `list_all`. Raises InvalidRequest without `vocab_size` if a set is stored as the ids that it does not have.
    """
    if not (sets.counts < -(0 if list_all else 1)).any():
        return sets.ids.astype(np.int32), np.maximum(sets.counts, 0).astype(np.int32)
    if vocab_size is None:
        message = "a kept set is stored as the ids that it does not have: give 'vocab_size', the number of logits"
        raise InvalidRequest(message, param="vocab_size")
    rows = [np.zeros(0, np.int32)]
    for count, kept in zip(sets.counts.tolist(), sets.masks(vocab_size), strict=True):
        is_listed = count > 0 or count < (0 if list_all else -1)
        rows.append((np.flatnonzero(kept) if is_listed else rows[0]).astype(np.int32))
    return np.concatenate(rows), np.array([len(row) for row in rows[1:]], np.int32)


def bounded_sets(
    sets: KeptSets, tokens: NDArray[np.integer[Any]], vocab_size: int | None, max_support: int
) -> NDArray[np.int32]:
    """The sets as int32 [L, K], with the sampled token first in its row, then ascending, and -1 after the last id.

    K is the size of the largest set. A missing set is a row of -1. The sets contain their tokens, as those of
    `trained_sets` do. Raises InvalidRequest for a set of more than `max_support` ids.
    """
    ids, sizes = flat_sets(sets, vocab_size, list_all=True)
    width = int(sizes.max(initial=0))
    if width > max_support:
        message = f"token {int(sizes.argmax())} has a kept set of {width} ids, and 'max_support' is {max_support}"
        raise InvalidRequest(message, param="max_support")
    found = np.full((len(sets), width), -1, np.int32)
    found[np.arange(width) < sizes[:, None]] = ids
    if not width:
        return found
    at = (found == np.asarray(tokens)[:, None]).argmax(axis=1)  # 0 in a row of -1
    moved = np.empty_like(found)
    moved[:, 0] = found[np.arange(len(found)), at]
    moved[:, 1:] = np.where(np.arange(1, width) <= at[:, None], found[:, :-1], found[:, 1:])
    return moved


def _sampled_turns(sample: Sample) -> Mask:
    """Which trained tokens are of turns whose logprobs are of the restricted distribution already, bool [L]."""
    of = np.array([turn.get("logprobs_of") == "sampled" for turn in sample.turns] + [False])
    return np.asarray(of[sample.turn_ids])


def _refuse(sample: Sample, column: str, why: str, on_missing: OnMissing) -> None:
    """Raise InvalidRequest unless a sample may be left out."""
    if on_missing == "refuse":
        raise InvalidRequest(
            f"sample {sample.interaction_id!r} has not all of its {column}: {why}; export or train without this "
            "sample, or give on_missing='leave_out'",
            param="samples",
        )
