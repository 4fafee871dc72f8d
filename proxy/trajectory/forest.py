"""The rows of layout concat as packed sequences, in which rows share the tokens that they begin with (layout forest).

A position of a row merges with that of another row if all keys up to it are equal. The key of a token that a turn of
the row sampled is its own, so it merges only with the same token in other rows of its session. The key of any other
token is its id, together with its image and, if they must be equal, its rows of experts. What merges is context in all
rows but at most one, so the loss of each trained token is that of its row.

Rows in the order of their keys are a depth-first walk of the tree: each row adds the tokens after those that it shares
with the row before it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from proxy.side_columns.columns import EXPERTS
from proxy.trajectory.advantages import Group, group_of
from proxy.trajectory.forest_sample import ForestSample, Walk
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.path_sample import PathSample
from proxy.trajectory.sample_row import Labels
from proxy.types import SessionRecord
from tokengrove.options.export import Experts, Merge
from tokengrove.reasons import Unmerged

Keys = NDArray[np.int64]
_IMAGE, _SAMPLED = 1 << 32, 1 << 62
"""Keys of placeholders of images are above token ids, and keys of sampled tokens above these."""


class Packer:
    """Packs rows into sequences, group by group. The rows of one group at most, and one sequence, are held."""

    def __init__(self, options: LayoutOptions) -> None:
        assert options.forest is not None
        self._options, self._forest = options, options.forest
        self._group: Group | None = None
        self._rows: list[PathSample] = []
        self._open: dict[str, Walk] = {}
        self._counts = Counter[str]()

    def add(self, record: SessionRecord, rows: Sequence[PathSample]) -> list[ForestSample]:
        """Add the rows of a session; return the sequences that are complete. Sessions of a group come one after the
        other."""
        group = None if self._forest.merge is Merge.ALL else group_of(record.session_id, record.group_id)
        made = list(self._packed()) if group != self._group else []
        self._group = group
        self._rows += rows
        return made

    def finish(self) -> list[ForestSample]:
        """The sequences that are left."""
        made = [*self._packed(), *(self._closed(walk) for walk in self._open.values() if walk.rows)]
        self._open.clear()
        return made

    def counts(self) -> Labels:
        """Counts of all sequences: `sequences`, `rows`, `row_tokens` (in the rows), `tokens` (in the sequences),
        `merged_tokens` (the difference), `repeated_tokens` (context in several sequences), and `unmerged_tokens`: equal
        ids after equal ids that are apart, by reason."""
        names = ("sequences", "rows", "row_tokens", "tokens", "repeated_tokens")
        found: Labels = {name: self._counts[name] for name in names}
        apart = {reason.value: self._counts[reason] for reason in Unmerged if self._counts[reason]}
        return {**found, "merged_tokens": found["row_tokens"] - found["tokens"], "unmerged_tokens": apart}

    def _packed(self) -> Iterator[ForestSample]:
        """The sequences that the rows held complete; the last one stays open if others may fit."""
        by_route: dict[str, list[PathSample]] = {}
        for row in self._rows:
            by_route.setdefault(row.last.route, []).append(row)
        self._rows = []
        for route, rows in by_route.items():
            tree = tree_of(rows, self._forest.experts)
            self._counts.update(tree.unmerged)
            yield from self._placed(route, tree)

    def _placed(self, route: str, tree: RowTree) -> Iterator[ForestSample]:
        """Place a tree in the open sequence if it fits, else in a new one; one that fits in none, in several."""
        most, walk = self._forest.max_tokens, self._open.setdefault(route, Walk())
        if walk.rows and (most is None or walk.tokens + tree.tokens > most >= tree.tokens):
            yield self._closed(walk)
            walk = Walk()
        for row, shared in zip(tree.rows, tree.shared, strict=True):
            new = len(row.arrays.input_ids) - shared
            if most is not None and walk.rows and walk.tokens + new > most:
                yield self._closed(walk)
                walk = Walk()
                walk.repeated = shared
            walk.add(row, shared if walk.rows else 0)
        self._open[route] = walk

    def _closed(self, walk: Walk) -> ForestSample:
        tokens = sum(len(row.arrays.input_ids) for row in walk.rows)
        self._counts.update(sequences=1, rows=len(walk.rows), tokens=walk.tokens, row_tokens=tokens)
        self._counts["repeated_tokens"] += walk.repeated
        return ForestSample(walk, self._options)


@dataclass(frozen=True, slots=True)
class RowTree:
    """Rows in the order of a depth-first walk. `shared`: the number of tokens that each shares with the one before it.

    `unmerged`: the numbers of tokens that are apart though their ids and all ids before them are equal, by reason.
    """

    rows: Sequence[PathSample]
    shared: Sequence[int]
    unmerged: Counter[str] = field(default_factory=Counter)

    @property
    def tokens(self) -> int:
        """The number of tokens of the tree."""
        return sum(len(row.arrays.input_ids) for row in self.rows) - sum(self.shared)


def tree_of(rows: Sequence[PathSample], experts: Experts) -> RowTree:
    """The tree of rows of one route."""
    keys = [row.arrays.input_ids.astype(np.int64) for row in rows]
    steps: dict[Unmerged, Callable[[Sequence[PathSample], Sequence[Keys]], list[Keys]]] = {}
    if any(row.images for row in rows):
        steps[Unmerged.IMAGES] = _with_images
    steps[Unmerged.SAMPLED] = _with_sampled
    if experts is Experts.EQUAL:
        steps[Unmerged.EXPERTS] = _with_experts
    order, shared = _walked(keys)
    unmerged = Counter[str]()
    for reason, change in steps.items():
        before, keys = sum(shared), change(rows, keys)
        order, shared = _walked(keys)
        unmerged[reason] = before - sum(shared)
    return RowTree([rows[at] for at in order], shared, unmerged)


def _with_images(rows: Sequence[PathSample], keys: Sequence[Keys]) -> list[Keys]:
    """Keys of placeholders that are equal only for equal images."""
    numbers: dict[tuple[str, str], int] = {}
    found = [key.copy() for key in keys]
    for row, key in zip(rows, found, strict=True):
        for image in row.images:
            number = numbers.setdefault((image.digest, image.detail), len(numbers) + 1)
            key[image.start : image.start + image.length] += number * _IMAGE
    return found


def _with_experts(rows: Sequence[PathSample], keys: Sequence[Keys]) -> list[Keys]:
    """Keys that are equal where the keys and the rows of experts are equal; a missing row is equal to another one.

    An answer whose experts differ between branches, as those of its last token may, is there twice: once trained, once
    as context.
    """
    found = [row.side().get(EXPERTS) for row in rows]
    parts = [each.values.reshape(len(each), -1) for each in found if each is not None]
    if len(parts) < len(rows):
        return list(keys)
    whole = np.concatenate(parts)
    rows_of = np.ascontiguousarray(whole).view(np.dtype((np.void, whole.dtype.itemsize * whole.shape[1]))).reshape(-1)
    numbers = np.unique(rows_of, return_inverse=True)[1].astype(np.int64)
    answers: dict[tuple[str, bytes], int] = {}
    for row, own in zip(rows, np.split(numbers, np.cumsum([len(key) for key in keys])[:-1]), strict=True):
        for placed in row.placements:
            if placed.start is not None:
                span = slice(placed.start, placed.start + len(placed.interaction.output_ids))
                which = (placed.interaction.id, own[span].tobytes())
                own[span] = -1 - answers.setdefault(which, len(answers))
    pairs = np.stack([np.concatenate(keys), numbers], axis=1)
    joined = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
    return np.split(joined, np.cumsum([len(key) for key in keys])[:-1])


def _with_sampled(rows: Sequence[PathSample], keys: Sequence[Keys]) -> list[Keys]:
    """Keys of sampled tokens that are equal only for the same token of the same turn."""
    first: dict[str, int] = {}
    total = 0
    found = [key.copy() for key in keys]
    for row, key in zip(rows, found, strict=True):
        for placed in row.placements:
            if placed.start is None:
                continue
            length, name = len(placed.interaction.output_ids), placed.interaction.id
            if name not in first:
                first[name] = total
                total += length
            key[placed.start : placed.start + length] = _SAMPLED + first[name] + np.arange(length)
    return found


def _walked(keys: Sequence[Keys]) -> tuple[list[int], list[int]]:
    """The order of a depth-first walk, and the number of keys that each row shares with the one before it."""
    texts = [key.astype(">i8").tobytes() for key in keys]
    order = sorted(range(len(keys)), key=texts.__getitem__)
    shared = [_common(keys[first], keys[second]) for first, second in pairwise(order)]
    return order, [0, *shared][: len(order)]


def _common(first: Keys, second: Keys) -> int:
    """The length of the longest common prefix."""
    length = min(len(first), len(second))
    differ = np.flatnonzero(first[:length] != second[:length])
    return int(differ[0]) if len(differ) else length
