"""A sample of a whole tree, each node once, for attention over shared prefixes (layout tree)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from proxy.trajectory.sample_row import (
    MROPE,
    Columns,
    Labels,
    Weighting,
    image_labels,
    placed_rewards,
    row_labels,
    scalar,
    turn_labels,
)
from proxy.trajectory.side_source import SideOf, no_columns, side_arrays, side_labels
from proxy.trajectory.token_arrays import BoolArray, FloatArray, Placement, TokenArrays
from proxy.types import PlacedImage, SessionRecord
from tokengrove.options.session import RewardScope


@dataclass(frozen=True, slots=True)
class TreeSample:
    """The nodes of a session, each once, parents before children; node n has the tokens offsets[n] to offsets[n + 1].

    `parents`: the index of each node's parent, -1 for a root and for a node that is not aligned with its parent.
    `positions`: the position of each token in its own sequence (root to node). A token attends to its own node and to
    the ancestors of that node. `turn_ids` are indexes of nodes. `mrope`: the positions [3, T] of a vision model.
    `side` joins its side columns, which are large, at every call.
    """

    session: SessionRecord
    placements: tuple[Placement, ...]
    purpose: str
    arrays: TokenArrays
    offsets: NDArray[np.int32]
    parents: NDArray[np.int32]
    positions: NDArray[np.int32]
    returns: tuple[float, ...]
    main: tuple[float | None, ...]
    weighting: Weighting = Weighting()
    extras: tuple[Labels, ...] = ()
    images: tuple[PlacedImage, ...] = ()
    mrope: NDArray[np.int64] | None = None
    side: Callable[[], SideOf] = no_columns

    @property
    def is_trained(self) -> bool:
        return bool(self.arrays.loss_mask.any())

    def with_weight(self, weight: float) -> TreeSample:
        return replace(self, weighting=replace(self.weighting, weight=weight))

    def labels(self) -> Labels:
        last = self.placements[-1].interaction
        turns = []
        for at, placed in enumerate(self.placements):
            extra = self.extras[at] if self.extras else {}
            turns.append({**turn_labels(placed, self.main[at], self.returns[at]), **extra})
        return {
            **row_labels(self.session, self.placements, self.purpose),
            **self.weighting.labels(),
            "finish_reason": last.finish_reason.value if last.finish_reason else None,
            "sampling": last.sampling.to_json(),
            "masked_tokens": 0,
            **image_labels(self.images),
            **side_labels(self.side(), self._expected),
            "turns": turns,
        }

    def columns(self) -> Columns:
        """The columns of a `PathSample`, for all T tokens of N nodes, and those of the tree.

        int32: position_ids [T], node_offsets [N + 1], node_parents and node_positions [N] (the position of a node's
        first token). float32 [N]: node_rewards, node_returns. `rewards` float32 [1] is the score of the sample; with
        scope path it is the sum of node_rewards.
        """
        arrays, length = self.arrays, len(self.arrays.input_ids)
        main = np.array([value or 0.0 for value in self.main], np.float32)
        found: Columns = {
            "input_ids": arrays.input_ids,
            "loss_mask": arrays.loss_mask,
            "logprobs": arrays.logprobs,
            "versions": arrays.versions,
            "turn_ids": arrays.turn_ids,
            "attention_mask": np.ones(length, bool),
            "position_ids": self.positions,
            "node_offsets": self.offsets,
            "node_parents": self.parents,
            "node_positions": np.array([placed.interaction.prefix_length for placed in self.placements], np.int32),
            "node_rewards": main,
            "node_returns": np.array(self.returns, np.float32),
            "rewards": scalar(self._reward(main)),
            "raw_rewards": main[-1:],
            **self.weighting.columns(),
        }
        if self.mrope is not None:
            found[MROPE] = self.mrope
        if (rewards := placed_rewards(length, self.placements)) is not None:
            found["token_rewards"] = rewards
        if arrays.unmasked is not None:
            found["unmasked_logprobs"] = arrays.unmasked
        return {**found, **side_arrays(self.side())}

    @property
    def _expected(self) -> dict[bool, BoolArray]:
        """As in `PathSample.expected`. The last token of a node that no other node continues has no forward pass."""
        passes = np.ones(len(self.arrays.input_ids), bool)
        ends = np.setdiff1d(np.arange(len(self.parents)), self.parents)
        passes[self.offsets[ends + 1] - 1] = False
        return {True: self.arrays.loss_mask.astype(bool), False: passes}

    def _reward(self, main: FloatArray) -> float:
        if self.weighting.scope is RewardScope.PATH:
            return float(main.sum(dtype=np.float64))
        return self.weighting.score or 0.0
