"""A packed sequence of layout forest: trees of tokens in depth-first order, each token once.

Token q attends to token k if tin[k] <= tin[q] < tout[k], and its logprob comes from the logits of its parent. A trained
token has the values of the one row that trains it; every other token is context. A row is the path from a root to its
end; its values, such as its advantage, are spread over the tokens that it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.side_columns.rows import SideColumn, SideRows, spread
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.sample_row import MROPE, Columns, Labels, image_labels, placed_rewards
from proxy.trajectory.side_source import side_arrays, side_labels
from proxy.trajectory.token_arrays import FloatArray, IntArray, Placement
from proxy.types import PlacedImage
from tokengrove.options.export import Images


@dataclass(slots=True)
class Walk:
    """Rows of a sequence, depth first. `shared`: the number of tokens that each shares with the one before it.

    `tokens`: the number of tokens of the sequence. `repeated`: of these, those that an earlier sequence has too.
    """

    rows: list[PathSample] = field(default_factory=list)
    shared: list[int] = field(default_factory=list)
    tokens: int = 0
    repeated: int = 0

    def add(self, row: PathSample, shared: int) -> None:
        """Append a row."""
        self.rows.append(row)
        self.shared.append(shared)
        self.tokens += len(row.arrays.input_ids) - shared


class ForestSample:
    """A sequence of T tokens with R rows."""

    def __init__(self, walk: Walk, options: LayoutOptions) -> None:
        self.rows, self.repeated, self._shared, self._length = walk.rows, walk.repeated, walk.shared, walk.tokens
        self._options = options

    @cached_property
    def paths(self) -> list[IntArray]:
        """The indexes of the tokens of each row, int32 [tokens of the row] each."""
        found: list[IntArray] = []
        end = 0
        for row, shared in zip(self.rows, self._shared, strict=True):
            above = found[-1][:shared] if found else np.zeros(0, np.int32)
            new = np.arange(end, end + len(row.arrays.input_ids) - shared, dtype=np.int32)
            found.append(np.concatenate([above, new]))
            end += len(new)
        return found

    @property
    def is_trained(self) -> bool:
        return any(row.is_trained for row in self.rows)

    @property
    def placements(self) -> tuple[Placement, ...]:
        return tuple(placed for row in self.rows for placed in row.placements)

    @property
    def images(self) -> tuple[PlacedImage, ...]:
        """The images of all rows, each once where rows share it."""
        if self._options.images is Images.NONE:
            return ()
        found = (
            image._replace(start=int(path[image.start]))
            for row, path, shared in self._laid()
            for image in row.images
            if image.start >= shared
        )
        return tuple(found)

    def labels(self) -> Labels:
        """`group_ids`; `rows`: the labels of each, with spans of turns in the sequence; `tokens`, `row_tokens` (in the
        rows) and `repeated_tokens`; images and side columns as in a row."""
        rows = [{**_moved(row.about(), path), **_steps(row)} for row, path, _ in self._laid()]
        trained = self._spread("loss_mask", np.int32, 0)
        context = {False: np.ones(self._length, bool), True: trained.astype(bool)}
        context[False][[int(path[-1]) for path in self.paths if len(path)]] = False
        context[False][self._parents[self._parents >= 0]] = True
        return {
            "group_ids": list(dict.fromkeys(row["group_id"] for row in rows)),
            "rows": rows,
            "tokens": self._length,
            "row_tokens": sum(len(path) for path in self.paths),
            "repeated_tokens": self.repeated,
            **image_labels(self.images),
            **side_labels(self._side, context),
        }

    def columns(self) -> Columns:
        """int32 [T]: input_ids, loss_mask, versions, turn_ids (in the row), row_ids, parent, tin, tout, position_ids.
        float32 [T]: logprobs, rewards (of the row) and, if requested, advantages, step_advantages and turn_advantages;
        token_rewards and unmasked_logprobs as in rows. int32 [R]: row_ends. float32 [R]: row_rewards, row_raw_rewards,
        row_weights.
        """
        found: Columns = {
            "input_ids": self._appended(lambda row: row.arrays.input_ids),
            "loss_mask": self._spread("loss_mask", np.int32, 0),
            "logprobs": self._spread("logprobs", np.float32, 0.0),
            "versions": self._spread("versions", np.int32, -1),
            "turn_ids": self._spread("turn_ids", np.int32, -1),
            "row_ids": self._of_rows(range(len(self.rows)), np.int32, -1),
            "parent": self._parents,
            "tin": np.arange(self._length, dtype=np.int32),
            "tout": self._ends,
            "position_ids": self._appended(lambda row: np.arange(len(row.arrays.input_ids), dtype=np.int32)),
            "rewards": self._of_rows([row.rewards[0] for row in self.rows], np.float32, 0.0),
            "row_ends": np.array([path[-1] for path in self.paths], np.int32),
            "row_rewards": np.array([row.rewards[0] for row in self.rows], np.float32),
            "row_raw_rewards": np.array([row.raw_rewards[0] for row in self.rows], np.float32),
            "row_weights": np.array([row.weighting.weight for row in self.rows], np.float32),
        }
        return {**found, **self._compared(), **self._rare(), **side_arrays(self._side)}

    def _laid(self) -> list[tuple[PathSample, IntArray, int]]:
        """Each row, its path, and the number of tokens that it shares with the row before it."""
        return list(zip(self.rows, self.paths, self._shared, strict=True))

    @cached_property
    def _parents(self) -> IntArray:
        parents = np.arange(-1, self._length - 1, dtype=np.int32)
        for _, path, shared in self._laid():
            if len(path) > shared:
                parents[path[shared]] = path[shared - 1] if shared else -1
        return parents

    @property
    def _ends(self) -> IntArray:
        """`tout` of each token: the number of tokens before the first one that is neither it nor below it."""
        ends = np.full(self._length, self._length, np.int32)
        end = 0
        for (_, path, shared), following in zip(self._laid(), [*self._shared[1:], 0], strict=True):
            end += len(path) - shared
            ends[path[following:]] = end
        return ends

    def _appended(self, values: Any) -> NDArray[Any]:
        """The values of each token in the first row with it. `values`: an array [..., tokens] of a row."""
        return np.concatenate([values(row)[..., shared:] for row, _, shared in self._laid()], axis=-1)

    def _spread(self, name: str, dtype: Any, context: float) -> NDArray[Any]:
        """The array `name` of the row that trains each token, [T]; `context` for other tokens."""
        found = np.full(self._length, context, dtype)
        for row, path, _ in self._laid():
            trained = row.arrays.loss_mask > 0
            found[path[trained]] = getattr(row.arrays, name)[trained]
        return found

    def _of_rows(self, values: Any, dtype: Any, context: float) -> NDArray[Any]:
        """The value of the row that trains each token, [T]; `context` for other tokens."""
        found = np.full(self._length, context, dtype)
        for value, (row, path, _) in zip(values, self._laid(), strict=True):
            found[path[row.arrays.loss_mask > 0]] = value
        return found

    def _compared(self) -> Columns:
        found: Columns = {}
        if self._options.advantages is not None:
            of_rows = [row.weighting.advantage or 0.0 for row in self.rows]
            found["advantages"] = self._of_rows(of_rows, np.float32, 0.0)
            found["row_advantages"] = np.array(of_rows, np.float32)
        if self._options.step_advantages is not None:
            found["step_advantages"] = self._of_turns([row.weighting.steps or () for row in self.rows])
        if self._options.turn_advantages is not None:
            found["turn_advantages"] = self._of_turns([row.weighting.turns or () for row in self.rows])
        return found

    def _of_turns(self, values: Sequence[Sequence[float]]) -> FloatArray:
        """The value of the turn that sampled each trained token, float32 [T]; 0 on context."""
        found = np.zeros(self._length, np.float32)
        for own, (row, path, _) in zip(values, self._laid(), strict=True):
            trained = row.arrays.loss_mask > 0
            if len(own):
                found[path[trained]] = np.array(own, np.float32)[row.arrays.turn_ids[trained]]
        return found

    def _rare(self) -> Columns:
        """The columns that only some sequences have."""
        found: Columns = {}
        if self.rows[0].positions is not None:
            found[MROPE] = self._appended(_mrope)
        rewards = [placed_rewards(len(row.arrays.input_ids), row.placements) for row in self.rows]
        if any(each is not None for each in rewards):
            found["token_rewards"] = np.zeros(self._length, np.float32)
            for each, path in zip(rewards, self.paths, strict=True):
                if each is not None:
                    found["token_rewards"][path] = each
        if any(row.arrays.unmasked is not None for row in self.rows):
            found["unmasked_logprobs"] = self._unmasked()
        return found

    def _unmasked(self) -> FloatArray:
        found = np.zeros(self._length, np.float32)
        for row, path, _ in self._laid():
            trained = row.arrays.loss_mask > 0
            told = row.arrays.logprobs if row.arrays.unmasked is None else row.arrays.unmasked
            found[path[trained]] = told[trained]
        return found

    @cached_property
    def _side(self) -> dict[str, SideRows]:
        """The side columns. Of the rows that share a token, the first with a value for it counts."""
        parts: dict[str, list[SideColumn]] = {}
        for row, path, _ in self._laid():
            for name, values in row.side().items():
                for start, end in _runs(path):
                    parts.setdefault(name, []).append(SideColumn(int(path[start]), values[start:end]))
        return {name: spread(columns, 0, self._length) for name, columns in parts.items()}


def _steps(row: PathSample) -> Labels:
    """The advantages of each turn, if requested."""
    found = {"step_advantages": row.weighting.steps, "turn_advantages": row.weighting.turns}
    return {name: list(values) for name, values in found.items() if values is not None}


def _mrope(row: PathSample) -> NDArray[np.int64]:
    assert row.positions is not None
    return row.positions(row.images, len(row.arrays.input_ids))


def _runs(path: IntArray) -> list[tuple[int, int]]:
    """The runs [start, end) of consecutive indexes of a path."""
    edges = (np.flatnonzero(np.diff(path) != 1) + 1).tolist()
    return list(zip([0, *edges], [*edges, len(path)], strict=True)) if len(path) else []


def _moved(labels: Labels, path: IntArray) -> Labels:
    """The labels of a row, with the spans of its turns in the sequence."""
    for turn in labels["turns"]:
        if turn["span"] is not None:
            start, end = turn["span"]
            first = int(path[start]) if start < len(path) else int(path[-1]) + 1
            turn["span"] = [first, first + end - start]
    return labels
