"""What a search for text found, below the list of sessions: a line for each turn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.text import Text

from tokengrove.terminal.figures import one_line


def matches(entries: Sequence[Mapping[str, Any]], unindexed: int) -> Iterator[Text]:
    """Lines for `matches` of the entries of `GET /rl/sessions`. `unindexed`: sessions that are not searched whole."""
    for entry in entries:
        for match in entry["matches"]:
            before, found, after = (one_line(match["snippet"][name]) for name in ("before", "match", "after"))
            place = one_line(f"{entry['session_id']} {match['interaction_id']}: ")
            yield Text.assemble((place, "dim"), before, (found, "bold"), after)
    if unindexed:
        yield Text(f"{unindexed} sessions have turns that are not indexed yet", "yellow")
