"""Steps that must be completed, even if their task is cancelled meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_the_end(step: Coroutine[Any, Any, T]) -> T:
    """Await `step` and shield it from cancellation. A cancellation is raised after the step has ended."""
    running = asyncio.ensure_future(step)
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.shield(running)
        except asyncio.CancelledError as error:
            cancelled = error
        except Exception:
            break  # raised by the step; `result` raises it below
    if cancelled is not None and not running.cancelled():
        running.exception()  # retrieve it, so that asyncio does not log it: the cancellation is raised instead
        raise cancelled
    return running.result()
