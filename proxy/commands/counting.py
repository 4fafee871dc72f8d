"""A terminal line with the progress of a long command."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(verb: str) -> Iterator[Callable[[int, int | None], None]]:
    """Yield a function that shows the numbers of sessions and interactions done. Shows nothing without a terminal."""
    from rich.console import Console

    with Console(stderr=True).status(f"{verb} nothing yet") as status:

        def tell(sessions: int, interactions: int | None = None) -> None:
            more = "" if interactions is None else f", {interactions} interactions"
            status.update(f"{verb} {sessions} sessions{more}")

        yield tell
