"""The interface of export formats: `add` each session, then `finish`. At most one session is in memory at a time,
and of rows that are made when they are read only a few.

`add` and `finish` are generators of bytes to send, perhaps none, and of images that they are to be sent. They block:
iterate them in a worker thread.
"""

from __future__ import annotations

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
        """End the answer with the fields `end`: `cursor` (where the next page begins) and those of a claim."""

    def close(self) -> None:
        """Release temporary files. Called at the end, also if the client left early; an unused encoder holds none."""


def dumps(value: Any) -> bytes:
    """Encode JSON; numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
