"""Servers of uvicorn stop at once in a process that imports this: its sleeps of 0.1 s are longer than most tests."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn.server


class _Impatient:
    """The module asyncio, except that `sleep` looks soon again whether the server is to stop."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    @staticmethod
    async def sleep(delay: float) -> None:
        await asyncio.sleep(min(delay, 0.01))


setattr(uvicorn.server, "asyncio", _Impatient())  # noqa: B010 (a module has no such attribute to mypy)
