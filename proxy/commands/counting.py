"""A line on the terminal that tells how far a long command is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(verb: str) -> Iterator[Callable[[int, int | None], None]]:
    """Give a function that tells how many sessions and interactions are done. Without a terminal nothing is shown."""
    from rich.console import Console

    with Console(stderr=True).status(f"{verb} nothing yet") as status:

        def tell(sessions: int, interactions: int | None = None) -> None:
            more = "" if interactions is None else f", {interactions} interactions"
            status.update(f"{verb} {sessions} sessions{more}")

        yield tell
