"""Where a scenario with real processes plays."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e.load import sqlite_url
from tests.e2e.processes import Process, server_process


class Place:
    """The seed's choices, a folder, and the server that runs, if one does. `output`: what processes printed."""

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance, self.folder = chance, folder
        self.process: Process | None = None
        self.output = ""

    @property
    def database(self) -> str:
        return sqlite_url(self.folder)

    @asynccontextmanager
    async def server(self, *flags: str, database_url: str | None = None) -> AsyncIterator[str]:
        """Run a server during the block, which may end it."""
        with server_process(self.folder, *flags, database_url=database_url) as self.process:
            try:
                yield self.process.url
            finally:
                self.output += self.process.output

    async def some_time(self, most_s: float) -> None:
        await asyncio.sleep(self.chance.uniform(0.0, most_s))

    async def end(self) -> None:
        """Kill the server or ask it to stop. Raises AssertionError unless a stop is orderly."""
        assert self.process is not None
        if self.chance.random() < 0.5:
            await asyncio.to_thread(self.process.kill)
            return
        self.process.terminate()
        assert await asyncio.to_thread(self.process.wait) == 0, "the exit code of a stopped server"
        assert "Traceback" not in self.process.output, "a traceback of a stopped server"
