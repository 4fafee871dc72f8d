"""The side columns of the tokens of a path: which turns have their rows, and the rows themselves.

A token has the row of the turn that brought it: the turn that sampled it, or the first one with it in its prompt. The
last token of an output is taken in by the next turn, which therefore has its row of a forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from proxy.side_columns.columns import Columns, declared
from proxy.side_columns.rows import SideColumn, SideRows, spread
from proxy.trajectory.token_path import PartKind, PathPart, TokenPath
from proxy.types import Interaction


class PathColumns:
    """The side columns of the tokens [start, end) of a path."""

    def __init__(self, path: TokenPath, start: int, end: int) -> None:
        self.start, self.end = start, end
        first = min(start, len(path.ids) - 1)  # no tokens at the end are of the last turn
        self._parts = [part for part in path.parts if part.start <= end and part.end > first]

    @property
    def turns(self) -> Sequence[Interaction]:
        """The turns that brought these tokens or the one after them, oldest first."""
        return tuple({part.interaction.id: part.interaction for part in self._parts}.values())

    @property
    def outputs(self) -> Sequence[PathPart]:
        """The outputs among these tokens, as far as they are in [start, end)."""
        return [part for part in self._parts if part.kind is PartKind.OUTPUT and part.start < self.end]

    def are_recorded(self, name: str) -> bool:
        """Whether one of the turns recorded the column, with or without rows for these tokens."""
        return any(name in turn.replay for turn in self.turns)

    def rows(self, name: str, stored: Mapping[str, Columns]) -> SideRows | None:
        """The rows of these tokens; None if all are missing. `stored`: the columns of `turns`, by interaction id."""
        pieces = list(self._pieces(name, stored))
        return spread(pieces, self.start, self.end) if pieces else None

    def _pieces(self, name: str, stored: Mapping[str, Columns]) -> Iterator[SideColumn]:
        of_output = declared(name).of_output
        for part, after in zip(self._parts, [*self._parts[1:], None], strict=True):
            if of_output and part.kind is not PartKind.OUTPUT:
                continue
            if (column := _placed(part, name, stored)) is not None:
                yield column.within(part.start, part.end)
            if not of_output and after is not None and _shift(after) == 0:
                column = _placed(after, name, stored)
                if column is not None:
                    yield column.within(part.end - 1, part.end)


def _placed(part: PathPart, name: str, stored: Mapping[str, Columns]) -> SideColumn | None:
    """The column of the turn of a part, at the positions of the path."""
    column = stored.get(part.interaction.id, {}).get(name)
    return None if column is None else column.moved(_shift(part))


def _shift(part: PathPart) -> int:
    """How far an output is from its place in its own turn: not 0 if a prompt rendered anew has it elsewhere."""
    return part.start - part.interaction.prompt_tokens if part.kind is PartKind.OUTPUT else 0
