"""Long work beside turns: after each slice it rests for as long as that took while turns run, so that they have half of
the machine at least and wait for one slice at most."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

_T = TypeVar("_T")


class Pace:
    """`turns_run` says whether any turn is under way."""

    def __init__(self, turns_run: Callable[[], bool]) -> None:
        self._turns_run = turns_run

    async def work(self, slice_: Awaitable[_T]) -> _T:
        """What a slice of work comes to, after the rest that it costs."""
        begun = time.perf_counter()
        result = await slice_
        if self._turns_run():
            await asyncio.sleep(time.perf_counter() - begun)
        return result
