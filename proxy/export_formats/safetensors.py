"""The safetensors format: eight bytes of header length, a JSON header, then every array, end to end.

`__metadata__` has `samples` (labels of each row), `sessions` (entries by id) and `cursor`, each as JSON text. It is
written here, since it is a header and bytes, and a library would want all of them in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from proxy.errors import InvalidRequest
from proxy.export_formats.encoder import Entry, Fields, dumps
from proxy.export_formats.spool import Part, Spool
from proxy.trajectory.columns import Column
from proxy.trajectory.samples import SampleRow

# The library refuses longer headers.
_MAX_HEADER_BYTES = 100_000_000
# Where the arrays begin is aligned for the widest dtype; wider ones come first, so all of them are.
_ALIGNMENT = 8
_NAMES = {"int32": "I32", "int64": "I64", "float32": "F32", "bool": "BOOL"}


class SafetensorsEncoder:
    """Columns wait in temporary files until all rows are there: the header comes first and tells all lengths."""

    media_type = "application/octet-stream"

    def __init__(self, columns: Sequence[Column]) -> None:
        self._spool = Spool(columns)

    def add(self, session_id: str, rows: Sequence[SampleRow], entry: Entry) -> Iterator[bytes]:
        self._spool.add(session_id, rows, entry)
        yield from ()  # a generator: it writes where the next piece is asked for, which is not the event loop

    def finish(self, end: Fields) -> Iterator[bytes]:
        parts = sorted(self._spool.parts(), key=lambda part: -part.dtype.itemsize)
        yield _header(parts, self._metadata(end))
        for part in parts:
            yield from part.chunks()

    def close(self) -> None:
        self._spool.close()

    def _metadata(self, end: Fields) -> dict[str, str]:
        return {
            "samples": self._spool.samples_json().decode(),
            "sessions": self._spool.sessions_json().decode(),
            **{name: dumps(value).decode() for name, value in end.items()},
        }


def _header(parts: Sequence[Part], metadata: dict[str, str]) -> bytes:
    """Raises InvalidRequest where the labels are more than a header may hold."""
    header: dict[str, Any] = {"__metadata__": metadata}
    start = 0
    for part in parts:
        end = start + part.size
        dtype = _NAMES[np.dtype(part.dtype).name]
        header[part.name] = {"dtype": dtype, "shape": list(part.shape), "data_offsets": [start, end]}
        start = end
    text = dumps(header)
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER_BYTES:
        raise InvalidRequest("too many samples for one safetensors header; ask for a smaller 'limit'", param="limit")
    return len(text).to_bytes(8, "little") + text
