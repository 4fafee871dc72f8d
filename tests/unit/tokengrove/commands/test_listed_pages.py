"""A list is read over pages that may be short, each from where the one before ended."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokengrove.commands.listed_sessions import _Pages, in_flags


class Source:
    """Answers with these pages; `asked`: limit and cursor of each query."""

    def __init__(self, *pages: tuple[int, str | None]) -> None:
        self._pages = iter(pages)
        self.asked: list[tuple[str, str | None]] = []

    def read(self, query: Mapping[str, str]) -> dict[str, Any]:
        self.asked.append((query["limit"], query.get("cursor")))
        count, cursor = next(self._pages)
        return {"sessions": [{}] * count, "cursor": cursor, "number": len(self.asked)}


def test_pages_are_followed_to_the_limit_and_the_first_one_is_kept() -> None:
    source = Source((2, "a"), (0, "b"), (3, "c"))
    pages = _Pages(source.read, {"order": "newest"}, "sessions", 5, 4)
    assert len(list(pages.entries())) == 5
    assert source.asked == [("4", None), ("3", "a"), ("3", "b")]
    assert (pages.first["number"], pages.more) == (1, True)


def test_a_list_that_ends_has_no_more() -> None:
    source = Source((2, "a"), (1, None))
    pages = _Pages(source.read, {}, "sessions", 5, 10)
    assert (len(list(pages.entries())), pages.more) == (3, False)


def test_errors_name_flags_in_place_of_filters() -> None:
    assert in_flags("'filter.reward.min' and 'filter.group_id'") == "--reward-min and --group"
    assert in_flags("'filter.reward' is odd") == "--reward-min and --reward-max is odd"
