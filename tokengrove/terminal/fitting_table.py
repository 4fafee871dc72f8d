"""A table that fits the terminal: less important columns are omitted before any becomes too narrow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

_GAP = 2


@dataclass(frozen=True, slots=True)
class Column:
    """A column. `rank`: columns with a higher rank are omitted first. `least`: its narrowest useful width.

    `whole`: long values are folded, not cut. `of`: returns the cell of a row.
    """

    name: str
    rank: int
    least: int
    of: Callable[[Mapping[str, Any]], Text | str]
    right: bool = False
    whole: bool = False


class FittingTable:
    """Rows with the columns that fit, and a caption."""

    def __init__(self, columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], caption: RenderableType) -> None:
        self._columns, self._rows, self._caption = columns, list(rows), caption

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        shown = fitting(self._columns, options.max_width)
        cells = [[_text(column.of(row)) for column in shown] for row in self._rows]
        natural = [_widest(column, [row[at] for row in cells]) for at, column in enumerate(shown)]
        widths = narrowed(natural, [column.least for column in shown], options.max_width - _GAP * (len(shown) - 1))
        table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
        for column, width in zip(shown, widths, strict=True):
            table.add_column(
                column.name,
                justify="right" if column.right else "left",
                overflow="fold" if column.whole else "ellipsis",
                no_wrap=not column.whole,
                width=width,
            )
        for row in cells:
            table.add_row(*row)
        if cells:
            yield table
        yield self._caption


def narrowed(natural: Sequence[int], least: Sequence[int], width: int) -> list[int]:
    """Widths of columns that fit `width` in total. The widest shrink first, none below its least width."""
    widths = list(natural)
    while sum(widths) > width:
        wide = [at for at, each in enumerate(widths) if each > least[at]]
        if not wide:
            return widths
        widths[max(wide, key=lambda at: widths[at])] -= 1
    return widths


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns whose least widths fit; at least the most important one."""
    shown = list(columns)
    while len(shown) > 1 and sum(column.least + _GAP for column in shown) - _GAP > width:
        shown.remove(max(shown, key=lambda column: column.rank))
    return shown


def _widest(column: Column, cells: Sequence[Text]) -> int:
    return max(len(column.name), column.least, *(cell.cell_len for cell in cells))


def _text(cell: Text | str) -> Text:
    return Text(cell) if isinstance(cell, str) else cell
