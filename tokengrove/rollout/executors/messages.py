"""Messages between this program and its worker processes: a length of four bytes, big-endian, then the content.

A worker receives pickles, because it runs the code of this program anyway. It sends JSON.
"""

from __future__ import annotations

import asyncio
import struct

_LENGTH = struct.Struct("!I")


async def receive(reader: asyncio.StreamReader) -> bytes | None:
    """The next message; None once the other side is gone."""
    try:
        head = await reader.readexactly(_LENGTH.size)
        return await reader.readexactly(_LENGTH.unpack(head)[0])
    except (asyncio.IncompleteReadError, OSError):
        return None


def send(writer: asyncio.StreamWriter, message: bytes) -> None:
    """Send a message without waiting. It is lost if the other side is gone."""
    if not writer.is_closing():
        writer.write(_LENGTH.pack(len(message)) + message)
