"""Arrow streams and Parquet, with pyarrow: lists of numbers become arrays, never Python lists."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
from numpy.typing import NDArray

from tokengrove.client.images import ImageTable, image_of_row
from tokengrove.client.libraries import library
from tokengrove.client.readers.page import Page, Source, page_of
from tokengrove.client.values import Json, by_id

if TYPE_CHECKING:
    import pyarrow as pa

_JSON_LABELS = ("sampling", "turns", "replay", "rows")


def read_arrow(source: Source) -> Page:
    """Read an Arrow stream. Raises InvalidRequest without pyarrow."""
    pa = library("pyarrow")
    rows: list[dict[str, Json]] = []
    told: dict[str, Json] = {"sessions": []}
    with _opened(pa, source) as file, pa.ipc.open_stream(file) as reader:
        for batch, metadata in reader.iter_batches_with_custom_metadata():
            rows += _rows(batch)
            said = {name.decode(): orjson.loads(text) for name, text in dict(metadata or {}).items()}
            told["sessions"] += by_id(said.pop("sessions", [])).values()
            told |= said
        images = _images(pa, file)
    if "cursor" not in told:
        raise ValueError("its last batch is missing")
    return page_of({**told, "samples": rows}, images)


def _images(pa: Any, file: pa.NativeFile) -> ImageTable:
    """The images in the stream that follows the stream of samples; empty without it."""
    if file.tell() == file.size():
        return {}
    with pa.ipc.open_stream(file) as reader:
        found = [image_of_row(row) for batch in reader for row in batch.to_pylist()]
    return {image.digest: image for image in found}


def read_parquet(source: Source) -> Page:
    """Read a Parquet file. Raises InvalidRequest without pyarrow."""
    pa, parquet = library("pyarrow"), library("pyarrow.parquet")
    rows: list[dict[str, Json]] = []
    with _opened(pa, source) as opened, parquet.ParquetFile(opened) as file:
        for batch in file.iter_batches():
            rows += _rows(batch)
        metadata = file.metadata.metadata or {}
    images = [image_of_row(each) for row in rows for each in row.pop("image_files", None) or ()]
    told = {name.decode(): orjson.loads(text) for name, text in metadata.items() if name != b"ARROW:schema"}
    return page_of({**told, "samples": rows}, {image.digest: image for image in images})


def _opened(pa: Any, source: Source) -> pa.NativeFile:
    return pa.OSFile(str(source)) if isinstance(source, Path) else pa.BufferReader(source)


def _rows(batch: pa.RecordBatch) -> Iterator[dict[str, Json]]:
    """Yield each row: lists of numbers as arrays, other columns as values. Null lists are omitted."""
    columns = {name: _column(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    for at in range(batch.num_rows):
        row = {name: column[at] for name, column in columns.items()}
        yield {name: value for name, value in row.items() if value is not _ABSENT}


_ABSENT = object()


def _column(name: str, column: pa.Array) -> Sequence[Any]:
    types = library("pyarrow.types")
    if types.is_list(column.type) and types.is_primitive(column.type.value_type):
        return _arrays(column)
    if types.is_list(column.type) and types.is_fixed_size_binary(column.type.value_type):
        return _bytes(column)
    if types.is_list(column.type) and types.is_list(column.type.value_type):
        lines: list[Any] = list(_arrays(column.values))
        return [np.stack(lines[start:end]) for start, end in pairwise(column.offsets.to_numpy().tolist())]
    values: list[Any] = column.to_pylist()
    return [orjson.loads(value) for value in values] if name in _JSON_LABELS else values


def _bytes(column: pa.ListArray) -> list[NDArray[np.uint8]]:
    """The bytes of the arrays of each row, one after the other, as a writable array."""
    width, data = column.type.value_type.byte_width, column.values
    whole = np.frombuffer(data.buffers()[1], np.uint8)[data.offset * width :]
    return [whole[start * width : end * width].copy() for start, end in pairwise(column.offsets.to_numpy().tolist())]


def _arrays(column: pa.ListArray) -> list[NDArray[Any] | object]:
    """One array per row. Offsets are relative to the beginning of `values`, even if the array is a slice."""
    offsets = column.offsets.to_numpy()
    values = np.array(column.values.to_numpy(zero_copy_only=False))
    present = column.is_valid().to_numpy(zero_copy_only=False)
    rows = zip(pairwise(offsets), present, strict=True)
    return [values[start:end] if there else _ABSENT for (start, end), there in rows]
