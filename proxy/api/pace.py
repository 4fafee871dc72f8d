"""Pacing of exports: while turns run, an export sleeps as long as each slice took.

So turns get at least half of the CPU time, and wait for at most one slice.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")


class Pace:
    """Paces slices of work. `turns_run` returns True while at least one turn is running."""

    def __init__(self, turns_run: Callable[[], bool]) -> None:
        self._turns_run = turns_run

    async def work(self, slice_: Awaitable[_T]) -> _T:
        """Run a slice of work, then sleep for its duration if turns run. Returns the result of the slice."""
        begun = time.perf_counter()
        result = await slice_
        if self._turns_run():
            await asyncio.sleep(time.perf_counter() - begun)
        return result
