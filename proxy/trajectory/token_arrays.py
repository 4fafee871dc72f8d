"""Token arrays of a sample, all of one length L.

Only a sampled token that is trained has loss mask 1, its logprob and its weight version. Every other token is context:
mask 0, logprob 0, version -1, turn -1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proxy.types import Ids, Interaction

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Placement:
    """An interaction in a sample. Its output begins at `start` (None: it is not there); `turn` counts from 0."""

    interaction: Interaction
    turn: int
    start: int | None
    train: bool

    @property
    def span(self) -> Span | None:
        """The range [start, end) of its output in the sample's tokens."""
        return None if self.start is None else (self.start, self.start + len(self.interaction.output_ids))


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """`input_ids`, `loss_mask`, `versions`, `turn_ids` int32 [L]; `logprobs` float32 [L]."""

    input_ids: IntArray
    loss_mask: IntArray
    logprobs: FloatArray
    versions: IntArray
    turn_ids: IntArray


def fill(ids: Ids, placements: Sequence[Placement]) -> TokenArrays:
    """Fill the arrays of a sample. Of an output, only the marked spans are trained; without spans, all of it."""
    length = len(ids)
    arrays = TokenArrays(
        input_ids=np.array(ids, np.int32),
        loss_mask=np.zeros(length, np.int32),
        logprobs=np.zeros(length, np.float32),
        versions=np.full(length, -1, np.int32),
        turn_ids=np.full(length, -1, np.int32),
    )
    for placement in placements:
        if placement.train and placement.span is not None:
            _fill_trained(arrays, placement.interaction, placement.turn, *placement.span)
    return arrays


def _fill_trained(arrays: TokenArrays, interaction: Interaction, turn: int, start: int, end: int) -> None:
    trained = np.zeros(end - start, bool)
    for first, last in interaction.spans or ((0, end - start),):
        trained[first:last] = True
    arrays.loss_mask[start:end] = trained
    arrays.logprobs[start:end] = np.where(trained, np.asarray(interaction.logprobs), 0.0)
    arrays.versions[start:end] = np.where(trained, token_versions(interaction), -1)
    arrays.turn_ids[start:end] = np.where(trained, turn, -1)


def token_versions(interaction: Interaction) -> IntArray:
    """The weight version of each output token, int32 [len(output_ids)]."""
    counts = [count for count, _ in interaction.versions]
    return np.repeat(np.array([version for _, version in interaction.versions], np.int32), counts)
