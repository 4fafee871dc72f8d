"""Where a scenario with real processes plays."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e.load import sqlite_url
from tests.e2e.processes import Process, server_process, told_of_stop


class Place:
    """The seed's choices, a folder, and the server that runs, if one does. `output`: what processes printed.

    `leaving`: some clients leave in the middle of their turns; a stop does not wait for turns that have no client.
    """

    def __init__(self, chance: random.Random, folder: Path) -> None:
        self.chance, self.folder = chance, folder
        self.process: Process | None = None
        self.output = ""
        self.leaving = True
        self._answers = 0

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

    def answered(self) -> None:
        """Note that a client has an answer whole. It may be the one at which the seed kills the server."""
        self._answers -= 1
        if self._answers == 0 and self.process is not None and self.process.alive:
            os.kill(self.process.pid, signal.SIGKILL)

    async def end(self, most_s: float, most_answers: int = 30) -> None:
        """Kill the server or stop it within `most_s`, or kill it at one of the next answers."""
        assert self.process is not None
        how = self.chance.choice(["stop", "stop", "kill", "kill at an answer"])
        if how == "kill at an answer":
            self._answers = self.chance.randint(1, most_answers)
            await asyncio.sleep(3 * most_s)
            self._answers = 0
        else:
            await self.some_time(most_s)
        if how != "stop":
            await asyncio.to_thread(self.process.kill if self.process.alive else self.process.wait)
        else:
            await self.stop()

    async def stop(self) -> list[str]:
        """Stop the server; return what it told of that.

        Raises AssertionError unless the stop is orderly and interrupts no turn of a client: none takes that long.
        """
        assert self.process is not None
        self.process.terminate()
        assert await asyncio.to_thread(self.process.wait) == 0, "the exit code of a stopped server"
        assert "Traceback" not in self.process.output, "a traceback of a stopped server"
        told = told_of_stop(self.process)
        assert self.leaving or not any(line.startswith("stopping: interrupted") for line in told), told
        return told
