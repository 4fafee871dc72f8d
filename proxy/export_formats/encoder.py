"""The interface of export formats: `add` each session, then `finish`. At most one session is in memory at a time, and
only a few of the rows that are made when they are read.

`add` and `finish` are generators. They yield bytes to send, perhaps none, and images that must be sent to them. They
block: iterate over them in a worker thread.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import orjson

from proxy.export_formats.image_table import Pieces
from proxy.trajectory.sample_row import SampleRow

Entry = Mapping[str, Any]
"""The `session_id` and certificate of one session, and its counts of masked, dropped and stale samples."""
Fields = Mapping[str, Any]


class Encoder(Protocol):
    """Encodes one answer in one format."""

    media_type: str

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        """Encode the next session, which may have no rows. `entry` describes it."""

    def finish(self, end: Fields) -> Pieces:
        """End the answer with the fields `end`: `cursor` (where the next page begins) and the fields of a claim."""

    def close(self) -> None:
        """Release temporary files. Called at the end, even if the client left early. An unused encoder has none."""


def dumps(value: Any) -> bytes:
    """Encode JSON. NumPy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


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
