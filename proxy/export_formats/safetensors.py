"""The safetensors format: eight bytes of header length, a JSON header, then the bytes of all arrays.

`__metadata__` has `samples` (labels of each row), `sessions` (entries) and `cursor`, each as JSON text. With images, it
also has `images`, which describes each by digest; their bytes are the arrays `images/DIGEST`. The format is written
here because the safetensors library needs all arrays in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from proxy.export_formats.encoder import Entry, Fields, dumps
from proxy.export_formats.image_table import ImageEntry, ImageTable, Pieces, described, given
from proxy.export_formats.spool import Part, Spool, SpooledImages, image_parts
from proxy.trajectory.columns import Column
from proxy.trajectory.sample_row import SampleRow
from tokengrove.errors import InvalidRequest

# The safetensors library rejects longer headers.
_MAX_HEADER_BYTES = 100_000_000
# The data section starts at a multiple of the widest dtype. Arrays are sorted by descending width, so all are aligned.
_ALIGNMENT = 8
_NAMES = {"int32": "I32", "int64": "I64", "float32": "F32", "bool": "BOOL", "uint8": "U8"}
_NAMES |= {"uint16": "U16", "uint32": "U32"}
_NAMES |= {"float16": "F16", "float64": "F64"}  # for arrays that a processor made from images


class SafetensorsEncoder:
    """Spools columns to temporary files until the last row, because the header comes first and contains all lengths."""

    media_type = "application/octet-stream"

    def __init__(self, columns: Sequence[Column], images: ImageTable) -> None:
        self._spool, self._images, self._files = Spool(columns), images, SpooledImages()

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        self._spool.entries.append(entry)
        for row in rows:
            self._images.note(row)
            self._spool.add(row)
            yield b""  # lets running turns proceed between two rows

    def finish(self, end: Fields) -> Pieces:
        told: dict[str, Any] = {}
        for wanted in self._images.wanted():
            told[wanted.digest] = self._spooled(given((yield wanted)))
        parts = sorted((*self._spool.parts(), *self._files.parts), key=lambda part: -part.dtype.itemsize)
        yield _header(parts, self._metadata({**end, **({"images": told} if told else {})}))
        for part in parts:
            yield from part.chunks()

    def _spooled(self, entry: ImageEntry) -> dict[str, Any]:
        """Spool the arrays of an image. Return its description."""
        self._files.add(image_parts(entry, has_bytes=self._images.has_bytes))
        return described(entry.file)

    def close(self) -> None:
        self._spool.close()
        self._files.close()

    def _metadata(self, end: Fields) -> dict[str, str]:
        return {
            "samples": self._spool.samples_json().decode(),
            "sessions": self._spool.sessions_json().decode(),
            **{name: dumps(value).decode() for name, value in end.items()},
        }


def _header(parts: Sequence[Part], metadata: dict[str, str]) -> bytes:
    """The header with its length. Raises InvalidRequest if the labels make it longer than the library accepts."""
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
        raise InvalidRequest(
            "too many samples for one safetensors header; lower 'limit' or choose another 'format'",
            param="limit",
        )
    return len(text).to_bytes(8, "little") + text
