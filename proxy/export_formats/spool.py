"""Spool the columns of an export, one temporary file each, for formats that store each column as a whole.

A column of fixed width is an array [rows, width]. A ragged column is flat, and `NAME.offsets` int64 [rows + 1] contains
the start of each row. An optional column that no row has is left out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np

from proxy.export_formats.encoder import Entry, dumps
from proxy.export_formats.image_table import ImageEntry, arrays
from proxy.trajectory.columns import Column
from proxy.trajectory.sample_row import Columns, SampleRow

# Large enough for a small cost per chunk, small enough for a hundred exports at once.
CHUNK_BYTES = 1 << 20


class Scratch:
    """A temporary file that is created by the first write, so that an unused encoder leaves none behind."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - `close` closes it
        self._file.write(data)

    def chunks(self, start: int = 0, size: int = sys.maxsize) -> Iterator[bytes]:
        """The written bytes from `start` on, at most `size` bytes."""
        if self._file is None:
            return
        self._file.seek(start)
        while size > 0 and (chunk := self._file.read(min(CHUNK_BYTES, size))):
            size -= len(chunk)
            yield chunk

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True)
class Spooled:
    """A column being spooled: its values in `file`, their number, and the length of each row."""

    column: Column
    file: Scratch = field(default_factory=Scratch)
    values: int = 0
    lengths: list[int] = field(default_factory=list)
    present: bool = False

    def add(self, row: Columns) -> None:
        """Append a row's array, little-endian. If the row lacks it, a column of fixed width gets zeros or the values of
        `instead`, a ragged column an empty row."""
        values = row.get(self.column.name)
        self.present = self.present or values is not None
        if values is None:
            instead = row.get(self.column.instead or "") if self.column.width else None
            values = np.zeros(self.column.width or 0, self.column.dtype) if instead is None else instead
        self.file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
        self.values += values.size
        self.lengths.append(values.size)

    @property
    def shape(self) -> tuple[int, ...]:
        """[values] for a ragged column, else [rows, width], [rows, lines, width] or [rows, width, *inner]."""
        width, lines = self.column.width, self.column.lines
        if width is None:
            return (self.values,)
        return (len(self.lengths), *(() if lines is None else (lines,)), width, *self.column.inner)


@dataclass(frozen=True, slots=True)
class Part:
    """One array of the answer. `source`: its bytes, little-endian; a file contains them from `start` on."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    source: Scratch | bytes
    start: int = 0

    @property
    def size(self) -> int:
        """Size in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def chunks(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
        else:
            yield from self.source.chunks(self.start, self.size)


def image_parts(entry: ImageEntry, *, has_bytes: bool) -> Iterator[Part]:
    """The arrays of an image: its original bytes, uint8, and the arrays that the model's processor made from it."""
    if has_bytes:
        data = entry.file.data
        yield Part(f"images/{entry.file.digest}", np.dtype(np.uint8), (len(data),), data)
    for name, values in arrays(entry).items():
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        yield Part(name, little.dtype, values.shape, little.tobytes())


class SpooledImages:
    """Arrays of images in one temporary file, for formats that begin with the lengths of all arrays."""

    def __init__(self) -> None:
        self._file = Scratch()
        self._bytes = 0
        self.parts: list[Part] = []

    def add(self, parts: Iterable[Part]) -> None:
        """Append arrays and release their memory."""
        for part in parts:
            assert isinstance(part.source, bytes)
            self._file.write(part.source)
            self.parts.append(replace(part, source=self._file, start=self._bytes))
            self._bytes += part.size

    def close(self) -> None:
        self._file.close()


class Spool:
    """All rows of an answer: their columns and labels, and the `entries` of their sessions."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = [Spooled(column) for column in columns]
        self._labels = Scratch()
        self.entries: list[Entry] = []
        self._between = b"["

    def add(self, row: SampleRow) -> None:
        """Append a row."""
        found = row.columns()
        for spooled in self._columns:
            spooled.add(found)
        self._labels.write(self._between + dumps(row.labels()))
        self._between = b","

    def parts(self) -> Iterator[Part]:
        """All arrays; a ragged column is followed by its offsets."""
        for spooled in self._columns:
            column = spooled.column
            if column.optional and not spooled.present:
                continue
            yield Part(column.name, column.dtype.newbyteorder("<"), spooled.shape, spooled.file)
            if column.width is None:
                offsets = np.cumsum([0, *spooled.lengths], dtype="<i8")
                yield Part(f"{column.name}.offsets", offsets.dtype, offsets.shape, offsets.tobytes())

    def samples_json(self) -> bytes:
        """The labels of all rows as a JSON array."""
        return (b"".join(self._labels.chunks()) or b"[") + b"]"

    def sessions_json(self) -> bytes:
        """The entries of the sessions as a JSON array."""
        return dumps(self.entries)

    def close(self) -> None:
        for file in (*(spooled.file for spooled in self._columns), self._labels):
            file.close()
