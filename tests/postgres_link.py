"""A link between a server and Postgres that a test cuts: at will, or at a commit before or after it was done."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

from sqlalchemy import make_url

_SOCKET = ".s.PGSQL.5432"
_COMMITTED = b"COMMIT\x00"
"""What Postgres answers when a commit is done."""


class Link:
    """Passes bytes on to the Postgres at the URL `behind`. `url`: its own, to be given to a server.

    `cut_at`: text in a client's statement after which the next commit of that connection is cut, once. `after`: that
    commit is done first, and its answer is lost. `cut`: set once that has happened.
    """

    def __init__(self, url: str) -> None:
        self.behind = url
        behind = make_url(url)
        self._target = str(Path(str(behind.query.get("host") or behind.host)) / _SOCKET)
        self._folder = tempfile.TemporaryDirectory(prefix="tokengrove-link-")
        query = {**behind.query, "host": self._folder.name}
        self.url = behind.set(query=query, host=None, port=None).render_as_string(hide_password=False)
        self.cut_at: bytes | None = None
        self.after = False
        self.cut = threading.Event()
        self._down = False
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        started = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(started,))
        self._thread.start()
        started.wait()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        self._folder.cleanup()

    def set_down(self, down: bool) -> None:
        """Cut all connections and refuse new ones, or take them again."""
        self._down = down
        if down:
            self._loop.call_soon_threadsafe(self._cut_all)

    def _run(self, started: threading.Event) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._listen(started))

    async def _listen(self, started: threading.Event) -> None:
        async with await asyncio.start_unix_server(self._serve, str(Path(self._folder.name) / _SOCKET)):
            started.set()
            await self._stop.wait()
            self._cut_all()

    def _cut_all(self) -> None:
        for writer in list(self._open):
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        server, to_server = await asyncio.open_unix_connection(self._target)
        both = {writer, to_server}
        self._open |= both
        lost = asyncio.Event()
        ways = [
            asyncio.create_task(self._forth(reader, to_server, lost)),
            asyncio.create_task(self._back(server, writer, lost)),
        ]
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        self._open -= both
        for each in both:
            each.transport.abort()

    async def _forth(self, reader: asyncio.StreamReader, to_server: asyncio.StreamWriter, lost: asyncio.Event) -> None:
        """Pass on what the client says. `lost` is set if nothing that is answered from now on may reach it."""
        seen = b""
        while data := await _read(reader):
            seen = (seen + data)[-200_000:] if self.cut_at is not None else b""
            at = seen.find(self.cut_at) if self.cut_at is not None else -1
            if at >= 0 and b"COMMIT" in seen[at:]:
                self.cut_at = None
                if not self.after:
                    self.cut.set()
                    return
                lost.set()
            to_server.write(data)

    async def _back(self, server: asyncio.StreamReader, writer: asyncio.StreamWriter, lost: asyncio.Event) -> None:
        """Pass on the answers; once they are to be lost, end with that of the commit."""
        while data := await _read(server):
            if not lost.is_set():
                writer.write(data)
            elif _COMMITTED in data:
                self.cut.set()
                return


async def _read(reader: asyncio.StreamReader) -> bytes:
    with contextlib.suppress(OSError):
        return await reader.read(65536)
    return b""


@contextlib.contextmanager
def linked(url: str) -> Iterator[Link]:
    link = Link(url)
    try:
        yield link
    finally:
        link.close()
