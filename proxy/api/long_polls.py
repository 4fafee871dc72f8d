"""Whoever waits for something to happen holds nothing up: once the server is asked to end, all are answered at once.

Their answer is the one that they give when their time is up. A client asks again, and finds the next server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LongPolls:
    """What waits on one server."""

    def __init__(self) -> None:
        self._ending = asyncio.Event()

    @property
    def ending(self) -> bool:
        """Whether nothing may wait any more."""
        return self._ending.is_set()

    def end(self) -> None:
        """Answer all that wait, and from now on let nobody wait. Call on the event loop."""
        self._ending.set()

    async def wait(self, something: Coroutine[Any, Any, T]) -> T | None:
        """The result of `something`, which is cancelled, with None as result, where the server ends before it."""
        happening = asyncio.ensure_future(something)
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([happening, ending], return_when=asyncio.FIRST_COMPLETED)
            return happening.result() if happening.done() else None
        finally:
            ending.cancel()
            happening.cancel()
            await asyncio.gather(happening, ending, return_exceptions=True)
