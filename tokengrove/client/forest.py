"""Packed sequences of layout forest, in which samples share the tokens that they begin with.

Token q attends to token k if `tin[k] <= tin[q] < tout[k]`, and its logprob comes from the logits of `parent[q]`. With
this attention and `position_ids`, each sample has the logits that it has alone, so a loss over the trained tokens is
that of the samples. The rule and the names are those of TRL's tree attention (huggingface/trl, pull request 7328).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.client.images import ImageBytes, concatenated
from tokengrove.client.libraries import library
from tokengrove.client.tensors import Array
from tokengrove.client.values import MROPE, Float32, Int32, Json, Sample, arrays_of, own_images, sample_of
from tokengrove.rows_beside import is_missing, missing_value, runs_of, set_sizes

if TYPE_CHECKING:
    import torch
    from torch.nn.attention.flex_attention import BlockMask


_EXPERTS = "routed_experts"
"""The side column with rows of forward passes. Others have rows of sampled tokens."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedSequence:
    """One sequence of T tokens with R samples, depth first: int32 [T] or [R], float32 where the name says values.

    `row_ids`: the sample that trains the token, -1 for context; `turn_ids`: the turn of that sample. `logprobs`,
    `versions`, `rewards` and, in `extra`, `advantages`, `step_advantages` and `turn_advantages` are those of that
    sample, 0 (versions -1) on context. `position_ids`: the position in a sample. `rows`: the labels of each sample, as
    in layout concat; the spans of their turns are places in this sequence. `row_ends`: the last token of each.
    `row_tokens`: the tokens of all samples, which the sequence has `len(input_ids)` of. `repeated_tokens`: context that
    an earlier sequence has too, because a group did not fit into one.
    """

    input_ids: Int32
    loss_mask: Int32
    logprobs: Float32
    versions: Int32
    turn_ids: Int32
    row_ids: Int32
    parent: Int32
    tin: Int32
    tout: Int32
    position_ids: Int32
    rewards: Float32
    row_ends: Int32
    row_rewards: Float32
    row_raw_rewards: Float32
    row_weights: Float32
    rows: tuple[Mapping[str, Json], ...]
    group_ids: tuple[str | None, ...] = ()
    row_tokens: int = 0
    repeated_tokens: int = 0
    images: tuple[Mapping[str, Json], ...] = ()
    extra: Mapping[str, Json] = field(default_factory=dict)
    image_table: Mapping[str, ImageBytes] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def multi_modal_inputs(self) -> dict[str, Array] | None:
        """The processor's output for the images, in the order of `images`, as in `Sample`."""
        return concatenated(self.images, self.image_table) if self.images and self.image_table else None

    def path(self, row: int) -> NDArray[np.intp]:
        """The indexes of the tokens of a sample, from its first on."""
        end = self.tin[self.row_ends[row]]
        return np.flatnonzero((self.tin <= end) & (end < self.tout))

    def samples(self) -> list[Sample]:
        """The samples, as layout concat has them."""
        return [self._sample(row) for row in range(len(self.rows))]

    def _sample(self, row: int) -> Sample:
        path = self.path(row)
        trained = self.row_ids[path] == row
        labels = dict(self.rows[row])
        turns = [{**turn, "span": self._span(turn["span"], path)} for turn in labels["turns"]]
        found: dict[str, Any] = {
            "input_ids": self.input_ids[path],
            "loss_mask": trained.astype(np.int32),
            "logprobs": np.where(trained, self.logprobs[path], np.float32(0)),
            "versions": np.where(trained, self.versions[path], -1),
            "turn_ids": np.where(trained, self.turn_ids[path], -1),
            "attention_mask": np.ones(len(path), bool),
            "rewards": self.row_rewards[row : row + 1],
            "raw_rewards": self.row_raw_rewards[row : row + 1],
            "weight": self.row_weights[row : row + 1],
            "images": [
                {**each, "start": int(np.searchsorted(path, each["start"]))}
                for each in self.images
                if np.isin(each["start"], path)
            ],
        }
        if "row_advantages" in self.extra:
            found["advantages"] = self.extra["row_advantages"][row : row + 1]
        for name in ("token_rewards", "unmasked_logprobs"):
            if name in self.extra:
                values = self.extra[name][path]
                found[name] = np.where(trained, values, np.float32(0)) if name == "unmasked_logprobs" else values
        if MROPE in self.extra:
            found[MROPE] = self.extra[MROPE][:, path]
        return sample_of({**labels, **found, **self._side(path, trained), "turns": turns}, self.image_table)

    def _side(self, path: NDArray[np.intp], trained: NDArray[np.bool_]) -> dict[str, Any]:
        """The side columns of a sample, and their description. Only experts have rows of tokens that it does not
        train."""
        found: dict[str, Any] = {}
        told: dict[str, Any] = {}
        for name, about in self.extra.get("replay", {}).items():
            kept = np.ones(len(path), bool) if name == _EXPERTS else trained
            if name in self.extra:
                values = self.extra[name][path]
                values[~kept] = missing_value(values.dtype)
                found[name], missing = values, is_missing(values)
            else:
                ids, counts = _chosen(self.extra[f"{name}_ids"], self.extra[f"{name}_counts"], path[kept])
                whole = np.zeros(len(path), np.int32)
                whole[kept] = counts
                found |= {f"{name}_ids": ids, f"{name}_counts": whole}
                missing = whole == 0
            expected = np.arange(len(path)) < len(path) - 1 if name == _EXPERTS else trained
            told[name] = {**about, "missing": runs_of(missing & expected)}
        return {**found, "replay": told} if told else {}

    @staticmethod
    def _span(span: Sequence[int] | None, path: NDArray[np.intp]) -> list[int] | None:
        if span is None:
            return None
        start = int(np.searchsorted(path, span[0]))
        return [start, start + span[1] - span[0]]


def _chosen(
    ids: NDArray[Any], counts: NDArray[np.int32], tokens: NDArray[np.intp]
) -> tuple[NDArray[Any], NDArray[np.int32]]:
    """The sets of some tokens: their ids, one after the other, and the count of each."""
    sizes = set_sizes(counts)
    ends = np.cumsum(sizes)
    parts = [ids[ends[token] - sizes[token] : ends[token]] for token in tokens]
    return np.concatenate([ids[:0], *parts]), counts[tokens]


def sequence_of(entry: Mapping[str, Json], images: Mapping[str, ImageBytes] | None = None) -> PackedSequence:
    """Parse a sequence of an export; arrays may be lists. Raises LookupError or ValueError."""
    placed = tuple(
        {key: value for key, value in each.items() if value is not None} for each in entry.get("images") or ()
    )
    given = {**entry, **arrays_of(entry), "images": placed, "image_table": own_images(placed, images or {})}
    given |= {name: tuple(entry[name]) for name in ("rows", "group_ids")}
    known = {each.name for each in fields(PackedSequence)} - {"extra"}
    rest = {name: value for name, value in given.items() if name not in known and name != "tokens"}
    return PackedSequence(**{name: value for name, value in given.items() if name in known}, extra=rest)


def attention_mask(sequence: PackedSequence) -> NDArray[np.bool_]:
    """Which tokens each token attends to, bool [T, T]: row q, column k."""
    tin, tout = sequence.tin, sequence.tout
    return np.asarray((tin[None] <= tin[:, None]) & (tin[:, None] < tout[None]))


def block_mask(sequence: PackedSequence, device: str = "cpu") -> BlockMask:
    """The same for `torch.nn.attention.flex_attention.flex_attention`. Raises InvalidRequest without torch."""
    torch, flex = library("torch"), library("torch.nn.attention.flex_attention")
    tin, tout = (torch.tensor(values, device=device) for values in (sequence.tin, sequence.tout))

    def sees(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return (tin[k] <= tin[q]) & (tin[q] < tout[k])

    found: BlockMask = flex.create_block_mask(sees, None, None, len(sequence), len(sequence), device=device)
    return found


def model_inputs(
    sequence: PackedSequence, device: str = "cpu", mask_dtype: torch.dtype | None = None
) -> dict[str, torch.Tensor]:
    """`input_ids`, `position_ids` int64 [1, T] and `attention_mask` [1, 1, T, T], as models of transformers take them.

    The mask is bool, for `attn_implementation="sdpa"`; with `mask_dtype`, the model's dtype, it is added to the scores,
    as `"eager"` does. Raises InvalidRequest without torch.
    """
    torch = library("torch")
    mask = torch.tensor(attention_mask(sequence), device=device)[None, None]
    if mask_dtype is not None:
        mask = torch.zeros_like(mask, dtype=mask_dtype).masked_fill(~mask, torch.finfo(mask_dtype).min)
    return {
        "input_ids": torch.tensor(sequence.input_ids, dtype=torch.long, device=device)[None],
        "position_ids": torch.tensor(sequence.position_ids, dtype=torch.long, device=device)[None],
        "attention_mask": mask,
    }


def token_logprobs(logits: torch.Tensor, sequence: PackedSequence) -> torch.Tensor:
    """The logprob of each token given the tokens above it, float [T], 0 for a token without any. `logits`: [T, V]."""
    parents, ids = (
        logits.new_tensor(each, dtype=library("torch").long) for each in (sequence.parent, sequence.input_ids)
    )
    above = logits[parents.clamp(min=0)]
    found: torch.Tensor = above.gather(-1, ids[:, None]).squeeze(-1) - above.logsumexp(-1)
    return found * (parents >= 0)


def counts_of(sequences: Sequence[PackedSequence]) -> dict[str, Json]:
    """The counts of an export that sequences show: all but why tokens are not merged."""
    rows, tokens = sum(each.row_tokens for each in sequences), sum(map(len, sequences))
    return {
        "sequences": len(sequences),
        "rows": sum(len(each.rows) for each in sequences),
        "row_tokens": rows,
        "tokens": tokens,
        "repeated_tokens": sum(each.repeated_tokens for each in sequences),
        "merged_tokens": rows - tokens,
    }
