"""The side columns of a session, as the samples of an export have them.

A row of the output belongs to a sampled token, and only a trained token has it. A row of a forward pass belongs to the
token that the pass took in. A sampled token keeps that of its sampling. Of the turns of a branch, the first that has a
row for a token counts, and a turn has none for the tokens before the last of its prefix. The last token of a sequence
has no such row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from proxy.side_columns.columns import DECLARED, KEPT, Columns, SideShape, declared
from proxy.side_columns.rows import SideColumn, SideRows, spread
from proxy.trajectory.layout_options import LayoutOptions
from proxy.trajectory.sample_row import Labels
from proxy.trajectory.token_arrays import BoolArray, IntArray, Placement
from proxy.trajectory.tree import Branch
from proxy.types import Interaction
from tokengrove.errors import InvalidRequest
from tokengrove.rows_beside import runs_of

SideOf = Mapping[str, SideRows]
"""The rows of a sample by the name of the column, one per token."""


def no_columns() -> SideOf:
    """The rows of a sample without side columns."""
    return {}


@dataclass(frozen=True, slots=True)
class SideSource:
    """The side columns of a session.

    `shapes`: the columns that samples have. `columns`: those of the session's turns, by interaction id.
    """

    shapes: Sequence[SideShape] = ()
    columns: Mapping[str, Columns] = field(default_factory=dict)

    def masks(self, interaction: Interaction) -> bool:
        """Whether samples have the kept set of each token of an output."""
        asked = any(shape.name == KEPT for shape in self.shapes)
        return asked and KEPT in self.columns.get(interaction.id, {}) and interaction.replay.get(KEPT) == 0

    def of_path(self, chain: Sequence[Branch], places: Sequence[Placement], length: int) -> SideOf:
        """The rows of a path of `length` tokens. `chain`: its last turn and the turns above it that it is aligned with,
        oldest first.
        """
        found = {}
        for shape in self.shapes:
            passes = (self._column(shape.name, node.interaction) for node in chain)
            sampled = itertools.chain(self._sampled(shape.name, places), passes)
            parts = self._outputs(shape.name, places) if declared(shape.name).of_output else sampled
            found[shape.name] = _rows(shape, parts, length)
        return found

    def of_tree(
        self, nodes: Sequence[Branch], places: Sequence[Placement], offsets: IntArray, parents: IntArray
    ) -> SideOf:
        """The rows of joined nodes; node n has the tokens offsets[n] to offsets[n + 1]."""
        found = {}
        for shape in self.shapes:
            passes = self._passes(shape.name, nodes, offsets, parents)
            parts = self._outputs(shape.name, places) if declared(shape.name).of_output else passes
            found[shape.name] = _rows(shape, parts, int(offsets[-1]))
        return found

    def _column(self, name: str, interaction: Interaction) -> SideColumn | None:
        return self.columns.get(interaction.id, {}).get(name)

    def _outputs(self, name: str, places: Sequence[Placement]) -> Iterator[SideColumn]:
        """The rows of trained tokens, at the places of their outputs."""
        for place in places:
            column = self._column(name, place.interaction)
            if column is None or place.start is None or place.trained is None or not place.trains:
                continue
            first = place.interaction.prompt_tokens
            rows = spread([column], first, first + len(place.trained))
            yield SideColumn(place.start, rows.only(place.trained))

    def _sampled(self, name: str, places: Sequence[Placement]) -> Iterator[SideColumn]:
        """The rows of the passes that took in sampled tokens when they were sampled, at the places of their outputs."""
        for place in places:
            column, first = self._column(name, place.interaction), place.interaction.prompt_tokens
            if column is not None and place.start is not None:
                yield column.within(first, column.end).moved(place.start - first)

    def _passes(self, name: str, nodes: Sequence[Branch], offsets: IntArray, parents: IntArray) -> Iterator[SideColumn]:
        """The rows of forward passes. The first row of an aligned node is of its parent's last token."""
        for at, node in enumerate(nodes):
            column, prefix = self._column(name, node.interaction), node.interaction.prefix_length
            if column is None:
                continue
            yield column.within(prefix, column.end).moved(int(offsets[at]) - prefix)
            if parents[at] >= 0:
                yield column.within(prefix - 1, prefix).moved(int(offsets[parents[at] + 1]) - prefix)


def _rows(shape: SideShape, parts: Iterable[SideColumn | None], length: int) -> SideRows:
    """Raises InvalidRequest for rows that `shape` cannot hold: a turn committed them after it was chosen."""
    wide = [SideColumn(part.start, _widened(part.rows, shape)) for part in parts if part is not None]
    try:
        return spread([SideColumn(0, shape.blank(0)), *wide], 0, length).as_dtype(shape.dtype)
    except ValueError as error:
        message = f"a turn recorded other rows of {shape.name} since this export began ({error}): repeat it"
        raise InvalidRequest(message, param="replay") from None


def _widened(rows: SideRows, shape: SideShape) -> SideRows:
    shorter = len(rows.inner) == len(shape.inner) and all(map(int.__le__, rows.inner, shape.inner))
    return rows.widened(shape.inner) if declared(shape.name).partial and shorter else rows


def replay_warnings(options: LayoutOptions, nodes: Iterable[Branch], columns: Mapping[str, Columns]) -> Iterator[str]:
    """Warnings about turns that recorded nothing of a column that the export names, and about columns of turns without
    any stored row, because they were pruned or the engine reported none.
    """
    turns = [node.interaction for node in nodes]
    for each in sorted(options.replay or ()):
        names = [name for name, column in DECLARED.items() if column.of is each]
        lacking = sum(not any(name in turn.replay for name in names) for turn in turns)
        if lacking:
            yield f"{lacking} of {len(turns)} turns recorded no {each} ('replay')"
    for name, column in DECLARED.items():
        if column.of in options.shows and (lost := sum(_lost(name, turn, columns) for turn in turns)):
            yield f"{lost} of {len(turns)} turns recorded {name}, and none of their rows is stored"


def _lost(name: str, turn: Interaction, columns: Mapping[str, Columns]) -> bool:
    """Whether a turn should have rows of a column, and none is stored."""
    start, end = declared(name).span(turn.prefix_length, turn.prompt_tokens, len(turn.output_ids))
    return name in turn.replay and start < end and name not in columns.get(turn.id, {})


def side_labels(side: SideOf, expected: Mapping[bool, BoolArray]) -> Labels:
    """The label `replay`: dtype and shape of each column, and the runs [first, end) of tokens whose row is missing.

    `expected`: the tokens that have a row, bool [L], of columns of outputs (True) and of forward passes (False). No
    label without columns.
    """
    told = {
        name: {
            "dtype": rows.values.dtype.name,
            "shape": list(rows.inner),
            "missing": runs_of(rows.missing & expected[declared(name).of_output]),
        }
        for name, rows in side.items()
    }
    return {"replay": told} if told else {}


def side_arrays(side: SideOf) -> dict[str, NDArray[np.generic]]:
    """The arrays of columns: fixed rows as they are; sets as the ids of all rows, and the count of each."""
    found: dict[str, NDArray[np.generic]] = {}
    for name, rows in side.items():
        if rows.counts is None:
            found[name] = rows.values
        else:
            found |= {f"{name}_ids": rows.values, f"{name}_counts": rows.counts}
    return found
