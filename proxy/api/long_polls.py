"""Long polls, which must not delay a shutdown: when the server stops, every waiting request is answered at once.

The answer is the same as after a timeout, so the client polls again and reaches the next server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LongPolls:
    """The long polls of one server."""

    def __init__(self) -> None:
        self._ending = asyncio.Event()

    @property
    def ending(self) -> bool:
        """True when the server is stopping and no request may wait."""
        return self._ending.is_set()

    def end(self) -> None:
        """End all current and future waits. Call on the event loop."""
        self._ending.set()

    async def wait(self, something: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of `something`. If the server stops first, cancel it and return None."""
        happening = asyncio.ensure_future(something)
        ending = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait([happening, ending], return_when=asyncio.FIRST_COMPLETED)
            return happening.result() if happening.done() else None
        finally:
            ending.cancel()
            happening.cancel()
            await asyncio.gather(happening, ending, return_exceptions=True)
