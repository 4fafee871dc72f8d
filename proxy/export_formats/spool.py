"""Columns on their way to a format that wants each whole: a temporary file a column, so memory holds none of them.

A column of fixed width is an array [rows, width]. A ragged one is flat, and `NAME.offsets` int64 [rows + 1] says where
each row begins. A column that no row has is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from tempfile import TemporaryFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from proxy.export_formats.encoder import Entry, dumps
from proxy.trajectory.columns import Column
from proxy.trajectory.samples import SampleRow

# Large enough that a chunk costs nothing beside its bytes, small enough that a hundred exports at once are no matter.
CHUNK_BYTES = 1 << 20


class Scratch:
    """A temporary file, which is there from its first write on: an answer that is never begun leaves none behind."""

    def __init__(self) -> None:
        self._file: IO[bytes] | None = None

    def write(self, data: bytes | memoryview) -> None:
        if self._file is None:
            self._file = TemporaryFile()  # noqa: SIM115 - as long as the scratch, which closes it
        self._file.write(data)

    def chunks(self) -> Iterator[bytes]:
        """All that was written, from its beginning."""
        if self._file is None:
            return
        self._file.seek(0)
        while chunk := self._file.read(CHUNK_BYTES):
            yield chunk

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


@dataclass(slots=True)
class Spooled:
    """A column as far as it was written: values in a file, and of a ragged one the length of every row."""

    column: Column
    file: Scratch = field(default_factory=Scratch)
    values: int = 0
    lengths: list[int] = field(default_factory=list)
    present: bool = False

    def add(self, values: NDArray[Any] | None) -> None:
        """One row's array; None where the row has none: 0 throughout in a column of fixed width, else empty."""
        self.present = self.present or values is not None
        if values is None:
            values = np.zeros(self.column.width or 0, self.column.dtype)
        self.file.write(values.astype(values.dtype.newbyteorder("<"), copy=False).data)
        self.values += len(values)
        self.lengths.append(len(values))

    @property
    def shape(self) -> tuple[int, ...]:
        width = self.column.width
        return (self.values,) if width is None else (len(self.lengths), width)


@dataclass(frozen=True, slots=True)
class Part:
    """One array of the answer and how to read its bytes, little-endian."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    source: Scratch | bytes

    @property
    def size(self) -> int:
        """In bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def chunks(self) -> Iterator[bytes]:
        if isinstance(self.source, bytes):
            yield self.source
        else:
            yield from self.source.chunks()


class Spool:
    """All rows of an answer, and what JSON is to be said about them."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self._columns = [Spooled(column) for column in columns]
        self._labels = Scratch()
        self._entries: dict[str, Entry] = {}
        self._between = b"["

    def add(self, session_id: str, rows: Sequence[SampleRow], entry: Entry) -> None:
        self._entries[session_id] = entry
        for row in rows:
            found = row.columns()
            for spooled in self._columns:
                spooled.add(found.get(spooled.column.name))
            self._labels.write(self._between + dumps(row.labels()))
            self._between = b","

    def parts(self) -> Iterator[Part]:
        """Every array, ragged ones followed by their offsets."""
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
        return dumps(self._entries)

    def close(self) -> None:
        for file in (*(spooled.file for spooled in self._columns), self._labels):
            file.close()
