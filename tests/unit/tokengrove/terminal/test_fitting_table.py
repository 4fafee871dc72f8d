"""A table fits the terminal: columns that matter less go first, then the widest are cut, and names stay whole."""

from __future__ import annotations

import pytest
from rich.console import Console

from tokengrove.terminal.fitting_table import Column, FittingTable, fitting, narrowed

COLUMNS = [
    Column("name", 0, 6, lambda row: row["name"], whole=True),
    Column("size", 1, 4, lambda row: row["size"], right=True),
    Column("about", 2, 5, lambda row: row["about"]),
]
ROWS = [
    {"name": "a-very-long-name", "size": "12", "about": "a long text that nobody needs in full"},
    {"name": "b", "size": "3456", "about": "漢字漢字漢字"},
]


def printed(width: int) -> list[str]:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(FittingTable(COLUMNS, ROWS, "beneath"))
    return [line.rstrip() for line in capture.get().splitlines()]


def test_columns_that_matter_less_are_left_out_first() -> None:
    names = {width: [column.name for column in fitting(COLUMNS, width)] for width in (3, 6, 12, 18, 19, 99)}
    assert names == {
        3: ["name"],
        6: ["name"],
        12: ["name", "size"],
        18: ["name", "size"],
        19: ["name", "size", "about"],
        99: ["name", "size", "about"],
    }


def test_the_widest_columns_give_way_and_none_below_its_least_width() -> None:
    assert narrowed([10, 4, 30], [6, 4, 5], 44) == [10, 4, 30]
    assert narrowed([10, 4, 30], [6, 4, 5], 24) == [10, 4, 10]
    assert sum(narrowed([10, 4, 30], [6, 4, 5], 20)) == 20
    assert narrowed([10, 4, 30], [6, 4, 5], 3) == [6, 4, 5]


def test_names_are_folded_and_other_texts_cut() -> None:
    assert printed(24) == [
        "name      size  about",
        "a-very-l    12  a long …",
        "ong-name",
        "b         3456  漢字漢 …",
        "beneath",
    ]


@pytest.mark.parametrize("width", range(6, 80))
def test_no_line_is_wider_than_the_terminal_and_no_name_is_lost(width: int) -> None:
    console = Console(width=width, color_system=None)
    lines = console.render_lines(FittingTable(COLUMNS, ROWS, ""), pad=False)
    assert all(sum(segment.cell_length for segment in line) <= width for line in lines)
    first = "".join(line.split(" ")[0] for line in printed(width)[1:-1])
    assert first.startswith("a-very-long-name") or "a-very-long-name" in first
