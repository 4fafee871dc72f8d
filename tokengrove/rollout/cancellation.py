"""Steps that have to be taken to the end, also when the task that takes them is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(step: Coroutine[Any, Any, T]) -> T:
    """Await `step` without letting a cancellation reach it; the cancellation is raised once the step has ended."""
    running = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break  # the step's own, raised below
    if cancelled is not None and not running.cancelled():
        running.exception()  # retrieved, so that asyncio does not report it: the cancellation is what is raised
        raise cancelled
    return running.result()
