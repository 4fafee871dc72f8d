"""Token arrays of a sample: all of one length L, mask 1 only on sampled tokens, logprob 0 and version -1 elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxy.types import Ids, Interaction

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Piece:
    """The tokens that one interaction adds to a sample: context ids, then its sampled ids. `turn` counts from 0."""

    context: Ids
    interaction: Interaction
    turn: int
    train: bool


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """`input_ids`, `loss_mask`, `versions`, `turn_ids` int32 [L]; `logprobs` float32 [L]; output `spans`."""

    input_ids: IntArray
    loss_mask: IntArray
    logprobs: FloatArray
    versions: IntArray
    turn_ids: IntArray
    spans: tuple[tuple[int, int], ...]


def join(pieces: Sequence[Piece]) -> TokenArrays:
    """One sample's arrays from its pieces in order. Untrained outputs are context: mask 0."""
    length = sum(len(piece.context) + len(piece.interaction.output_ids) for piece in pieces)
    arrays = TokenArrays(
        input_ids=np.zeros(length, np.int32),
        loss_mask=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        turn_ids=np.full(length, -1, np.int32),
        spans=(),
    )
    spans: list[tuple[int, int]] = []
    end = 0
    for piece in pieces:
        start, end = end + len(piece.context), end + len(piece.context) + len(piece.interaction.output_ids)
        arrays.input_ids[start - len(piece.context) : start] = piece.context
        arrays.input_ids[start:end] = piece.interaction.output_ids
        spans.append((start, end))
        if piece.train:
            _fill_trained(arrays, piece, start, end)
    return TokenArrays(
        arrays.input_ids, arrays.loss_mask, arrays.logprobs, arrays.versions, arrays.turn_ids, tuple(spans)
    )


def _fill_trained(arrays: TokenArrays, piece: Piece, start: int, end: int) -> None:
    trained = np.zeros(end - start, bool)
    for first, last in piece.interaction.spans or ((0, end - start),):
        trained[first:last] = True
    arrays.loss_mask[start:end] = trained
    arrays.logprobs[start:end] = np.where(trained, np.asarray(piece.interaction.logprobs), 0.0)
    arrays.versions[start:end] = np.where(trained, token_versions(piece.interaction), -1)
    arrays.turn_ids[start:end] = np.where(trained, piece.turn, -1)


def token_versions(interaction: Interaction) -> IntArray:
    """The weight version of every output token, int32 [len(output_ids)]."""
    counts = [count for count, _ in interaction.versions]
    return np.repeat(np.array([version for _, version in interaction.versions], np.int32), counts)
