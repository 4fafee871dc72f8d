"""A relay between clients and a server, as a tunnel has it: it can cut connections. As a program, it is a tunnel.

`python -m tests.relays PORT` relays a port of its own to PORT, and prints its URL after that of its documentation.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

Cut = Callable[[bytes], bool]
"""Whether to cut a connection instead of passing on these bytes from the server: all that it has sent so far."""


class Relay:
    """`url`: its own address. `cut`: which connections are cut; none at first. `count`: of connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.url = ""
        self.cut: Cut = lambda sent: False
        self.count = self.cuts = 0
        self._connections: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        """Relay connections during the block."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for connection in self._connections:
                connection.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(connection)
        connection.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.count += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        sending = asyncio.create_task(_pump(reader, back))
        try:
            with contextlib.suppress(OSError):
                await self._answer(there, writer)
        finally:
            sending.cancel()
            await asyncio.wait((sending,))
            for end in (writer, back):
                end.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        sent = b""
        while data := await reader.read(65536):
            sent += data
            if self.cut(sent):
                self.cuts += 1
                return
            writer.write(data)
            await writer.drain()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


async def _main(port: int) -> None:
    async with Relay(port).running() as relay:
        print("tunnels are explained in http://127.0.0.1:9/docs.")
        print(f"process {os.getpid()}, key {os.environ.get('TOKENGROVE_ADMIN_KEY')}")
        print(f"you are reachable under {relay.url}", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1])))
