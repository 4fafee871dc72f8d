"""A file object for libraries that write files. Its bytes are taken piece by piece and sent as the answer."""

from __future__ import annotations

import io
from typing import Any


class Outgoing(io.RawIOBase):
    """A write-only file in memory. `take` also works after the file was closed."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._position = 0

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def write(self, data: Any) -> int:
        piece = bytes(data)
        self._pieces.append(piece)
        self._position += len(piece)
        return len(piece)

    def take(self) -> bytes:
        """Remove and return the bytes written since the last call."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
