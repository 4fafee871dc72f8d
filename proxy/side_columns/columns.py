"""The side columns of a turn: which there are, what they have rows for, and how they are stored as bytes.

A new column of an engine is a new entry of `DECLARED`; storage, dumps, exports and readers follow. Scores of a turn by
models that did not sample it are columns too, with names that begin with `SCORES`, and so are the streams that a
trainer told of it (`told_prefix`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from proxy.side_columns import kept_sets
from proxy.side_columns.rows import SideColumn, SideRows
from tokengrove.options.start import Replay

KEPT, KEPT_LOGPROBS, EXPERTS, TOP_IDS, TOP_LOGPROBS = (
    *("kept", "kept_logprobs", "routed_experts"),
    *("top_token_ids", "top_logprobs"),
)


@dataclass(frozen=True, slots=True)
class Declared:
    """A column. `of`: what records it; None: it is no recording. `of_output`: it has one row per sampled token;
    otherwise one row per token that a forward pass took in, which the last token of a sequence does not have. `ragged`:
    a row is a set of ids. `partial`: a row may have missing entries at its end, so that rows of several lengths can be
    joined.
    """

    of: Replay | None
    of_output: bool = True
    ragged: bool = False
    partial: bool = False

    def span(self, prefix_tokens: int, prompt_tokens: int, output_tokens: int) -> tuple[int, int]:
        """The positions [start, end) of the tokens of which a turn has rows. `prefix_tokens`: those of its parent.

        The last token of the parent is the turn's: no forward pass takes it in before.
        """
        whole = prompt_tokens + output_tokens
        if self.of_output:
            return prompt_tokens, whole
        start = max(prefix_tokens - 1, 0)
        return start, max(start, whole - 1)


DECLARED: Mapping[str, Declared] = {
    KEPT: Declared(Replay.KEPT, ragged=True),
    KEPT_LOGPROBS: Declared(Replay.KEPT),
    EXPERTS: Declared(Replay.EXPERTS, of_output=False),
    TOP_IDS: Declared(Replay.TOP_LOGPROBS, partial=True),
    TOP_LOGPROBS: Declared(Replay.TOP_LOGPROBS, partial=True),
}

SCORES = "scores "
"""The prefix of stored columns of scores."""
TOLD = "told "
"""The prefix of stored columns that trainers told."""
_ADDED = Declared(None)


def declared(name: str) -> Declared:
    """What is declared of a stored or an exported column. Those not in `DECLARED` were added after the turn."""
    return DECLARED.get(name, _ADDED)


def is_known(name: str) -> bool:
    """Whether this release stores columns of this name; a newer one may store others."""
    return name in DECLARED or name.startswith((SCORES, TOLD))


def told_prefix(trainer: str, step: int) -> str:
    """What begins the names of the stored columns that a trainer told of a turn in a step. Streams follow by name, and
    values of whole samples, which have one row, by `=` and name. No name has a space or begins with `=`.
    """
    return f"{TOLD}{trainer} {step} "


class ToldName(NamedTuple):
    """The parts of the name of such a column. `whole`: a value of a whole sample."""

    trainer: str
    step: int
    name: str
    whole: bool


def told_by(name: str) -> ToldName | None:
    """The parts of the name of a column that a trainer told; None for another column."""
    if not name.startswith(TOLD):
        return None
    trainer, step, rest = name.removeprefix(TOLD).split(" ")
    return ToldName(trainer, int(step), rest.removeprefix("="), rest.startswith("="))


Columns = Mapping[str, SideColumn]
"""Side columns by name."""
NO_COLUMNS: Columns = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ColumnRequest:
    """The columns that a request asks of the engine.

    `max_kept`: the largest kept set, or complement of one, that is recorded. `start`: the position of the first token
    whose experts are wanted.
    """

    replay: frozenset[Replay]
    max_kept: int = 512
    start: int = 0


class SideShape(NamedTuple):
    """The kind of a column's rows. `dtype`: of its values, or of the ids of its sets. `inner`: the shape of a row."""

    name: str
    dtype: np.dtype[Any]
    inner: tuple[int, ...] = ()

    def blank(self, count: int) -> SideRows:
        """`count` missing rows of this kind."""
        if self.ragged:
            return SideRows(np.zeros(0, self.dtype), np.zeros(count, np.int32))
        return SideRows(np.zeros((0, *self.inner), self.dtype)).blank(count)

    @property
    def ragged(self) -> bool:
        return declared(self.name).ragged


class StoredColumn(NamedTuple):
    """A column as the database stores it. `shape`: sizes with commas."""

    name: str
    start: int
    number: int
    dtype: str
    shape: str
    data: bytes


def stored(name: str, column: SideColumn) -> StoredColumn:
    """Encode a column in the smallest dtype."""
    rows = column.rows.smallest()
    values = rows.values
    data = kept_sets.packed(rows) if rows.ragged else values.astype(values.dtype.newbyteorder("<")).tobytes()
    return StoredColumn(name, column.start, len(rows), values.dtype.name, ",".join(map(str, rows.inner)), data)


def shape_of(name: str, dtype: str, shape: str) -> SideShape:
    """The kind of rows of a stored column."""
    return SideShape(name, np.dtype(dtype), tuple(int(size) for size in shape.split(",") if size))


def loaded(column: StoredColumn) -> SideColumn:
    """Decode a column. Raises ValueError if its bytes do not fit its number of rows, TypeError for an unknown dtype."""
    shape = shape_of(column.name, column.dtype, column.shape)
    if shape.ragged:
        return SideColumn(column.start, kept_sets.unpacked(column.data, column.number, shape.dtype))
    values = np.frombuffer(column.data, shape.dtype.newbyteorder("<")).reshape(column.number, *shape.inner)
    return SideColumn(column.start, SideRows(values.astype(shape.dtype, copy=False)))
