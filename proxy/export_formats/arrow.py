"""Arrow IPC streams and Parquet files: one row per sample; arrays are lists, labels are strings, numbers or JSON text.

`sampling`, `turns` and `replay` are JSON text. A column with an array per token has the bytes of each array.
`token_rewards`, `unmasked_logprobs` and `images` are null in a row without them. In an Arrow stream, a session is one
record batch, or several if its rows are large. The custom metadata of its last batch contains `sessions` as JSON text
(a list of its entry). The last batch of the stream is empty and contains `cursor`. A Parquet file contains both in its
key-value metadata.

Each image appears once in an answer. In an Arrow stream, a second stream with one row per image follows the stream of
samples; readers of the first do not see it. A Parquet file has a column `image_files`: the images that no earlier row
contains.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxy.export_formats.encoder import Entry, Fields, Outgoing, dumps
from proxy.export_formats.image_table import AUTO, ImageEntry, ImageTable, Pieces, described, given
from proxy.trajectory.columns import FOREST_LABELS, Column
from proxy.trajectory.sample_row import Columns, Labels, SampleRow
from tokengrove.errors import UnsupportedParameter, how_to_get

if TYPE_CHECKING:
    import pyarrow as pa

_FILES = "image_files"
_TEXTS = ("interaction_id", "session_id", "group_id", "task_id", "purpose", "agent", "finish_reason", "reward_scope")
_JSON_LABELS = ("sampling", "turns", "replay", "rows")
# A batch or row group is written at this size in bytes: readers load one at a time, and memory here holds one.
_GROUP_BYTES = 8 << 20
# Columns with few distinct values in long runs, for which dictionary encoding is small.
_REPETITIVE = ("loss_mask", "versions", "turn_ids", "response_mask", *_TEXTS)


class RecordBatches:
    """Turns rows into record batches of one schema. Raises UnsupportedParameter if pyarrow is not installed."""

    def __init__(self, columns: Sequence[Column], more_labels: Sequence[str]) -> None:
        try:
            import pyarrow as pa
        except ImportError:
            message = f"formats arrow and parquet need pyarrow on the server: {how_to_get('tokengrove[export]')}"
            raise UnsupportedParameter(message, param="format") from None
        self._columns = columns
        self._rows: list[tuple[Labels, Columns]] = []
        self._size = 0
        places = {name: pa.int64() for name in ("start", "length", "width", "height")}
        place = pa.struct({"digest": pa.string(), **places, "detail": pa.string()})
        labels = {} if set(FOREST_LABELS) <= set(more_labels) else _row_labels()
        rare = {"truncated_tokens": pa.int64(), "images": pa.list_(place), _FILES: pa.list_(file_kind())}
        rare |= {"group_ids": pa.list_(pa.string())}
        rare |= dict.fromkeys(("tokens", "row_tokens", "repeated_tokens"), pa.int64())
        labels |= {name: rare.get(name, pa.string()) for name in more_labels}
        arrays = {column.name: _kind(column) for column in columns}
        self.schema: pa.Schema = pa.schema(list((labels | arrays).items()))
        self._labels = labels

    def add(self, row: SampleRow, more: Labels | None = None) -> None:
        """Append a row, with `more` labels."""
        columns = row.columns()
        self._rows.append((_flat({**row.labels(), **(more or {})}), columns))
        self._size += sum(values.nbytes for values in columns.values())

    @property
    def is_full(self) -> bool:
        """Whether the rows must be taken before another row is added."""
        return self._size >= _GROUP_BYTES

    def take(self) -> pa.RecordBatch:
        """Return and release the rows since the last call, perhaps none."""
        import pyarrow as pa

        labels, found = [each for each, _ in self._rows], [each for _, each in self._rows]
        self._rows, self._size = [], 0
        arrays = [pa.array([each[name] for each in labels], kind) for name, kind in self._labels.items()]
        arrays += [_lists(column, [each.get(column.name) for each in found]) for column in self._columns]
        return pa.record_batch(arrays, schema=self.schema)


def _row_labels() -> dict[str, pa.DataType]:
    """The types of the labels that rows of all layouts have, but for sequences of layout forest."""
    import pyarrow as pa

    labels = {name: pa.string() for name in (*_TEXTS, "sampling", "turns")}
    labels |= {"interaction_ids": pa.list_(pa.string()), "masked_tokens": pa.int64(), "recomputable": pa.string()}
    return labels | {"logprobs_of": pa.string(), "rewarded": pa.bool_(), "score": pa.float64()}


def _flat(labels: Labels) -> Labels:
    texts = {name: dumps(labels[name]).decode() for name in _JSON_LABELS if name in labels}
    return {"images": None, _FILES: None, "route": None, **labels, **texts}


def _kind(column: Column) -> pa.DataType:
    """The type of a column: lists of numbers, of lines of numbers, or of the bytes of arrays."""
    import pyarrow as pa

    if column.inner:
        return pa.list_(pa.binary(_row_bytes(column)))
    values = pa.list_(pa.from_numpy_dtype(column.dtype))
    return values if column.lines is None else pa.list_(values)


def _lists(column: Column, values: Sequence[Any]) -> pa.Array:
    """Make a list array. A value None becomes null."""
    import pyarrow as pa

    if column.lines is not None:
        lines = _lists(replace(column, lines=None), [line for value in values for line in value])
        return pa.ListArray.from_arrays(pa.array(range(0, len(lines) + 1, column.lines), pa.int32()), lines)
    if column.inner:
        return _binary(column, values)
    present = [value for value in values if value is not None]
    offsets = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32)
    flat = np.concatenate(present) if present else np.zeros(0, column.dtype)
    mask = pa.array([value is None for value in values]) if len(present) < len(values) else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(column.dtype, copy=False)), mask=mask)


def _row_bytes(column: Column) -> int:
    return math.prod(column.inner) * column.dtype.itemsize


def _binary(column: Column, values: Sequence[Any]) -> pa.Array:
    """Make a list array of the bytes of each token's array, little-endian: one value a token, however large."""
    import pyarrow as pa

    little = column.dtype.newbyteorder("<")
    offsets = np.cumsum([0, *map(len, values)], dtype=np.int32)
    flat = [value.reshape(-1) for value in values] or [np.zeros(0, little)]
    data = (flat[0] if len(flat) == 1 else np.concatenate(flat)).astype(little, copy=False)  # a long row is not copied
    kind = pa.binary(_row_bytes(column))
    arrays = pa.FixedSizeBinaryArray.from_buffers(kind, int(offsets[-1]), [None, pa.py_buffer(data)])
    return pa.ListArray.from_arrays(pa.array(offsets), arrays)


class ArrowEncoder:
    """An Arrow IPC stream, session after session. With images, a stream of images follows."""

    media_type = "application/vnd.apache.arrow.stream"

    def __init__(self, columns: Sequence[Column], more_labels: Sequence[str], images: ImageTable) -> None:
        self._batches, self._images = RecordBatches(columns, more_labels), images
        import pyarrow as pa

        self._outgoing = Outgoing()
        self._writer = pa.ipc.new_stream(self._outgoing, self._batches.schema)

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        for row in rows:
            if self._batches.is_full:
                self._writer.write_batch(self._batches.take())
                yield self._outgoing.take()
            self._images.note(row)
            self._batches.add(row)
        self._writer.write_batch(self._batches.take(), custom_metadata={"sessions": dumps([entry])})
        yield self._outgoing.take()

    def finish(self, end: Fields) -> Pieces:
        told = {name: dumps(value) for name, value in end.items()}
        self._writer.write_batch(self._batches.take(), custom_metadata=told)
        self._writer.close()
        yield self._outgoing.take()
        yield from self._files()

    def _files(self) -> Pieces:
        """The stream of images, one record batch per image; nothing without images."""
        import pyarrow as pa

        if not (wanted := self._images.wanted()):
            return
        schema = pa.schema(list(file_kind()))
        with pa.ipc.new_stream(self._outgoing, schema) as writer:
            for each in wanted:
                told = file_values(given((yield each)), has_bytes=self._images.has_bytes)
                writer.write_batch(pa.RecordBatch.from_pylist([told], schema))
                yield self._outgoing.take()
        yield self._outgoing.take()

    def close(self) -> None:
        self._writer.close()


class ParquetEncoder:
    """A Parquet file. A row group contains many sessions."""

    media_type = "application/vnd.apache.parquet"

    def __init__(self, columns: Sequence[Column], more_labels: Sequence[str], images: ImageTable) -> None:
        files = (_FILES,) if images.has_bytes else ()
        self._batches, self._images = RecordBatches(columns, (*more_labels, *files)), images
        from pyarrow import parquet

        self._outgoing = Outgoing()
        self._entries: list[Entry] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        names = self._batches.schema.names
        self._writer = parquet.ParquetWriter(
            self._outgoing,
            self._batches.schema,
            compression="lz4",
            use_dictionary=[_path(name) for name in _REPETITIVE if name in names],
            write_statistics=False,
        )

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        self._entries.append(entry)
        for row in rows:
            yield from self._add(row)
            if self._batches.is_full:
                self._take()
            if self._waiting_bytes >= _GROUP_BYTES:
                self._write_group()
                yield self._outgoing.take()
        self._take()
        if self._waiting_bytes >= _GROUP_BYTES:
            self._write_group()
            yield self._outgoing.take()

    def _add(self, row: SampleRow) -> Pieces:
        """Append a row, with the images that no earlier row contains."""
        files = []
        for wanted in self._images.note(row):
            files.append(file_values(given((yield wanted)), has_bytes=True))
        self._batches.add(row, {_FILES: files} if files else None)
        if files:
            self._take()  # its bytes count

    def _take(self) -> None:
        batch = self._batches.take()
        self._waiting.append(batch)
        self._waiting_bytes += batch.nbytes

    def finish(self, end: Fields) -> Pieces:
        self._write_group()
        self._writer.add_key_value_metadata(
            {"sessions": dumps(self._entries), **{name: dumps(value) for name, value in end.items()}}
        )
        self._writer.close()
        yield self._outgoing.take()

    def close(self) -> None:
        self._writer.close()

    def _write_group(self) -> None:
        import pyarrow as pa

        table = pa.Table.from_batches(self._waiting, self._batches.schema)
        self._waiting, self._waiting_bytes = [], 0
        if table.num_rows:
            self._writer.write_table(table)


def file_kind() -> pa.StructType:
    """The type of an image. `inputs`: the arrays that the model's processor made from it (little-endian)."""
    import pyarrow as pa

    values = [("detail", pa.string()), ("name", pa.string()), ("dtype", pa.string())]
    inputs = pa.struct([*values, ("shape", pa.list_(pa.int64())), ("data", pa.large_binary())])
    sizes = [("width", pa.int64()), ("height", pa.int64())]
    texts = [("digest", pa.string()), ("media_type", pa.string())]
    return pa.struct([*texts, *sizes, ("data", pa.large_binary()), ("inputs", pa.list_(inputs))])


def file_values(entry: ImageEntry, *, has_bytes: bool) -> dict[str, Any]:
    """An image as a value of the type `file_kind`; null for bytes or inputs that it lacks."""
    found = [
        {"detail": detail or AUTO, "name": name, "dtype": a.dtype.name, "shape": list(a.shape), "data": _little(a)}
        for detail, arrays in entry.inputs.items()
        for name, a in arrays.items()
    ]
    data = entry.file.data if has_bytes else None
    return {"digest": entry.file.digest, **described(entry.file), "data": data, "inputs": found or None}


def _little(values: NDArray[Any]) -> bytes:
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def _path(name: str) -> str:
    """The path of a column in the Parquet schema: the items of a list are nested below it."""
    return name if name in _TEXTS else f"{name}.list.element"
