"""The lines of side columns in a terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tokengrove.terminal.column_view import column_view

TOKENS = {"ids": [1, 2, 3, 4], "texts": ["a", "\x1b[31mred\n", None, "d"]}
KEPT = {"number": 37, "excluded": False, "ids": [2, 9], "texts": ["\x1b[2J", " tree"], "more": 35, "mass": 0.93}


def lines(count: int = 2, **columns: Any) -> list[str]:
    """The lines for tokens 1 and 2, without the headings."""
    given = {"start": 1, "end": 3, "vocab_size": 151_936, "kept": None, "experts": None, "alternatives": None}
    console = Console(width=120, color_system=None)
    with console.capture() as captured:
        console.print(column_view({**given, **columns}, TOKENS, count))
    return captured.get().splitlines()


def test_a_set_shows_its_size_its_mass_and_its_first_ids() -> None:
    shown = lines(kept=[KEPT, None])
    assert shown[1].split() == ["token", "text", "kept", "mass", "ids"]
    assert "37 of 151,936" in shown[2] and " 0.93 " in shown[2] and shown[2].rstrip().endswith("' tree' …")
    assert shown[3].split() == ["2", "3", "missing"]


def test_a_set_of_excluded_ids_is_not_taken_for_one_of_kept_ids() -> None:
    row = {**KEPT, "number": 2, "excluded": True, "more": 0, "mass": None}
    (shown,) = [line for line in lines(kept=[row, None]) if "151,936" in line]
    assert "all but 2 of 151,936" in shown and "not '" in shown and " - " in shown


def test_missing_experts_are_a_word_and_many_layers_are_cut() -> None:
    shown = lines(experts=[[[at, None] for at in range(48)], None])
    assert shown[1].split()[2:] == ["experts", "of", "each", "layer"]
    assert "0 - | 1 - | 2 -" in shown[2] and shown[2].rstrip().endswith("…")
    assert shown[3].split() == ["2", "3", "missing"]


def test_no_text_of_a_token_acts_on_the_terminal() -> None:
    shown = "\n".join(lines(kept=[KEPT, None], alternatives=[[[5, "\x1b[0m\u202e", -1.5]], None]))
    assert not {"\x1b", "\u202e"} & set(shown)


def test_rows_that_are_not_shown_are_counted() -> None:
    assert lines(count=2, experts=[None, None])[-1].split()[-1] == "missing"
    assert lines(count=90, experts=[None, None])[-1] == "… and 88 more: --whole"
