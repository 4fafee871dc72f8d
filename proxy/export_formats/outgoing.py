"""What a library writes as a file leaves as an answer: nothing stays here once it was taken."""

from __future__ import annotations

import io
from typing import Any


class Outgoing(io.RawIOBase):
    """A file that can only be written to; what was written is fetched with `take`, also after it was closed."""

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
        """The bytes that were written since the last time."""
        taken = b"".join(self._pieces)
        self._pieces.clear()
        return taken
