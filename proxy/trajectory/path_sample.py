"""A sample along one path of the tree, for the layouts individual and concat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from proxy.trajectory.sample_row import (
    MROPE,
    Columns,
    Labels,
    PositionsOf,
    Weighting,
    image_labels,
    placed_rewards,
    row_labels,
    turn_labels,
)
from proxy.trajectory.side_source import SideOf, no_columns, side_arrays, side_labels
from proxy.trajectory.token_arrays import BoolArray, FloatArray, Placement, TokenArrays
from proxy.types import Interaction, PlacedImage, SessionRecord


@dataclass(frozen=True, slots=True)
class PathSample:
    """A sample of a path in the tree: one interaction (layout individual), or the turns down to a leaf.

    `returns`, `main` (the main rewards) and `extras` (included messages and text) have one entry per turn. `rewards`
    float32 [1]: in layout individual, the return; in concat, the score of the session, path or agent
    (`trajectory.scores`). `raw_rewards` float32 [1]: the main reward of the last interaction, 0 if it has none. `side`
    joins its side columns, which are large, at every call.
    """

    session: SessionRecord
    placements: tuple[Placement, ...]
    purpose: str
    arrays: TokenArrays
    returns: tuple[float, ...]
    main: tuple[float | None, ...]
    rewards: FloatArray
    raw_rewards: FloatArray
    weighting: Weighting = Weighting()
    extras: tuple[Labels, ...] = ()
    text: str | None = None
    images: tuple[PlacedImage, ...] = ()
    positions: PositionsOf | None = None
    side: Callable[[], SideOf] = no_columns

    @property
    def last(self) -> Interaction:
        """The last interaction of the sample."""
        return self.placements[-1].interaction

    @property
    def masked_tokens(self) -> int:
        """The number of sampled tokens of its path that the sample does not contain as sampled."""
        return sum(placed.missing for placed in self.placements)

    @property
    def is_trained(self) -> bool:
        return bool(self.arrays.loss_mask.any())

    def with_weight(self, weight: float) -> PathSample:
        return replace(self, weighting=replace(self.weighting, weight=weight))

    def labels(self) -> Labels:
        return self.about({**image_labels(self.images), **side_labels(self.side(), self.expected)})

    def about(self, places: Labels | None = None) -> Labels:
        """Its labels. `places`: those of its images and side columns, which a sequence of layout forest has instead."""
        last = self.last
        labels = {
            **row_labels(self.session, self.placements, self.purpose),
            **self.weighting.labels(),
            "finish_reason": last.finish_reason.value if last.finish_reason else None,
            "sampling": last.sampling.to_json(),
            "masked_tokens": self.masked_tokens,
            **(places or {}),
            "turns": [self._turn(placed) for placed in self.placements],
        }
        return labels if self.text is None else {**labels, "text": self.text}

    @property
    def expected(self) -> dict[bool, BoolArray]:
        """The tokens that have a row in columns of outputs (True) and of forward passes (False), bool [L]."""
        passes = np.ones(len(self.arrays.input_ids), bool)
        passes[-1:] = False
        return {True: self.arrays.loss_mask.astype(bool), False: passes}

    def columns(self) -> Columns:
        """The columns of L tokens, and the columns of `weighting`.

        int32 [L]: input_ids, loss_mask, versions, turn_ids. float32 [L]: logprobs; token_rewards if any were set,
        unmasked_logprobs if the engine gave them for trained tokens. bool [L]: attention_mask, all True. float32 [1]:
        rewards, raw_rewards. int64 [3, L]: mrope_position_ids, with `positions`. The side columns (`side_arrays`).
        """
        arrays = self.arrays
        found: Columns = {
            "input_ids": arrays.input_ids,
            "loss_mask": arrays.loss_mask,
            "logprobs": arrays.logprobs,
            "versions": arrays.versions,
            "turn_ids": arrays.turn_ids,
            "attention_mask": np.ones(len(arrays.input_ids), bool),
            "rewards": self.rewards,
            "raw_rewards": self.raw_rewards,
            **self.weighting.columns(),
        }
        if self.positions is not None:
            found[MROPE] = self.positions(self.images, len(arrays.input_ids))
        if (rewards := placed_rewards(len(arrays.input_ids), self.placements)) is not None:
            found["token_rewards"] = rewards
        if arrays.unmasked is not None:
            found["unmasked_logprobs"] = arrays.unmasked
        return {**found, **side_arrays(self.side())}

    def to_json(self) -> dict[str, Any]:
        """Labels and columns in one dict; the arrays are numpy."""
        return {**self.labels(), **self.columns()}

    def _turn(self, placed: Placement) -> Labels:
        at = placed.turn
        extra = self.extras[at] if self.extras else {}
        return {**turn_labels(placed, self.main[at], self.returns[at]), **extra}
