"""Kept sets: for each token of a sample, the ids that the sampler could have drawn in its place.

Row i is the set of token i, so it restricts the logits at position i - 1. A token without a recorded set, such as a
token of the prompt, is missing: it is never taken for a token without a restriction unless the caller asks for masks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokengrove.errors import InvalidRequest
from tokengrove.rows_beside import set_sizes

Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class KeptSets:
    """The kept sets of L tokens, as an export has them in `kept_counts` and `kept_ids`.

    `counts` int32 [L], and `ids`, the listed ids of all sets, one set after another. A count n above 0 lists the n ids
    of the set. 0: no set was recorded. -(n + 1) lists the n ids that the set does not have; so -1 is a set of all ids.
    Raises InvalidRequest if the counts do not add up to the ids.
    """

    counts: NDArray[np.int32]
    ids: NDArray[Any]

    def __post_init__(self) -> None:
        if (listed := int(set_sizes(self.counts).sum())) != len(self.ids):
            message = f"the counts of the kept sets list {listed} ids, but there are {len(self.ids)}"
            raise InvalidRequest(message, param="kept_counts")

    def __len__(self) -> int:
        return len(self.counts)

    def __getitem__(self, at: slice) -> KeptSets:
        """The sets of consecutive tokens; a step is not supported."""
        first, stop, _ = at.indices(len(self))
        ends, stop = self._ends(), max(first, stop)
        return KeptSets(self.counts[first:stop], self.ids[ends[first] : ends[stop]])

    @property
    def missing(self) -> Mask:
        """Which tokens have no recorded set, bool [L]."""
        return np.asarray(self.counts == 0)

    @property
    def unrestricted(self) -> Mask:
        """Which tokens were sampled from the whole vocabulary, bool [L]."""
        return np.asarray(self.counts == -1)

    def sizes(self, vocab_size: int) -> NDArray[np.int64]:
        """The number of ids in each set, int64 [L]; 0 for a missing set."""
        listed = set_sizes(self.counts)
        return np.where(self.counts < 0, vocab_size - listed, listed)

    def contain(self, tokens: NDArray[np.integer[Any]]) -> Mask:
        """Whether the set of each token contains the id in `tokens`, bool [L]; False for a missing set."""
        rows = np.repeat(np.arange(len(self)), set_sizes(self.counts))
        listed = np.zeros(len(self), np.bool_)
        listed[rows[self.ids == np.asarray(tokens)[rows]]] = True
        return np.where(self.counts < 0, ~listed, listed)

    def of(self, token: int, vocab_size: int) -> NDArray[np.int64]:
        """The ids of the set of one token, ascending. Raises InvalidRequest if it is missing."""
        [kept] = self[token : token + 1].masks(vocab_size)
        if not self.counts[token]:
            raise InvalidRequest(f"token {token} has no recorded kept set", param="kept_counts")
        return np.flatnonzero(kept)

    def masks(self, vocab_size: int) -> Iterator[Mask]:
        """Yield the mask of each token, bool [vocab_size]: True for the ids of its set.

        The mask of a missing set is True everywhere, because nothing is known to be excluded: `missing` says where.
        Raises InvalidRequest for an id outside of the vocabulary.
        """
        if len(self.ids) and int(self.ids.max()) >= vocab_size:
            message = f"a kept set has id {int(self.ids.max())}, but the vocabulary has {vocab_size} ids"
            raise InvalidRequest(message, param="vocab_size")
        for count, listed in zip(self.counts.tolist(), self.listed(), strict=True):
            kept = np.full(vocab_size, count <= 0)
            kept[listed] = count > 0
            yield kept

    def mask(self, vocab_size: int) -> Mask:
        """All masks at once, bool [L, vocab_size]. A long sample takes L * vocab_size bytes: use slices, or `masks`."""
        found = np.ones((len(self), vocab_size), np.bool_)
        for row, kept in zip(found, self.masks(vocab_size), strict=True):
            row[:] = kept
        return found

    def log_softmax(self, logits: NDArray[np.floating[Any]]) -> NDArray[Any]:
        """The logprobs of all ids within the sets, for logits [L, vocabulary] of a float dtype: -inf outside of a set.

        Row i of the logits predicts token i. They are divided by the temperature already.
        """
        within = np.where(self.mask(logits.shape[-1]), logits, -np.inf)
        shifted = within - within.max(axis=-1, keepdims=True)
        with np.errstate(divide="ignore"):
            return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))

    def listed(self) -> list[NDArray[Any]]:
        """The ids that each row lists: those of its set, or those outside of it if its count is negative."""
        return np.split(self.ids, self._ends()[1:-1]) if len(self) else []

    def _ends(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(set_sizes(self.counts))])
