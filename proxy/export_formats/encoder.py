"""What every format does: take sessions one by one, then end. It blocks, and holds one session in memory at a time.

`add` and `finish` give bytes to send, maybe none; whoever iterates them does so in a worker thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any, Protocol

import orjson

from proxy.trajectory.samples import SampleRow


class ExportFormat(StrEnum):
    JSON = "json"
    JSONL = "jsonl"
    AREAL = "areal"
    NPZ = "npz"
    SAFETENSORS = "safetensors"
    ARROW = "arrow"
    PARQUET = "parquet"


Entry = Mapping[str, Any]
"""What an export says of one session."""
Fields = Mapping[str, Any]


class Encoder(Protocol):
    """One answer in one format."""

    media_type: str

    def add(self, session_id: str, rows: Sequence[SampleRow], entry: Entry) -> Iterator[bytes]:
        """The next session, which may have no rows."""

    def finish(self, end: Fields) -> Iterator[bytes]:
        """The last fields of the answer: `cursor`, where the next page begins, and what its maker adds."""

    def close(self) -> None:
        """Let go of files. Called at the end, and where the reader left before it; what was never begun holds none."""


def dumps(value: Any) -> bytes:
    """JSON; numpy arrays become lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)
