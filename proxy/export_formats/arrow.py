"""Arrow IPC streams and Parquet files: one row per sample; arrays are lists, labels are strings, numbers or JSON text.

`sampling` and `turns` are JSON text. `token_rewards` and `images` are null in a row that has none. In an Arrow stream,
a session is one record batch, or several if its rows are large; the custom metadata of its last batch has the JSON text
`sessions` (a list of its entry). The last batch of the stream is empty and has `cursor`. A Parquet file has both in its
key-value metadata.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from proxy.errors import UnsupportedParameter, how_to_get
from proxy.export_formats.encoder import Entry, Fields, dumps
from proxy.export_formats.outgoing import Outgoing
from proxy.trajectory.columns import Column
from proxy.trajectory.sample_row import Columns, Labels, SampleRow

if TYPE_CHECKING:
    import pyarrow as pa

_TEXTS = ("interaction_id", "session_id", "group_id", "task_id", "purpose", "agent", "finish_reason", "reward_scope")
_JSON_LABELS = ("sampling", "turns")
# A batch or row group is written when it has this many bytes: readers load one at a time, and memory here holds one.
_GROUP_BYTES = 16 << 20
# Columns of few distinct values in long runs: dictionary encoding makes them small.
_REPETITIVE = ("loss_mask", "versions", "turn_ids", "response_mask", *_TEXTS)


class RecordBatches:
    """Turn rows into record batches of one schema. Raises UnsupportedParameter if pyarrow is not installed."""

    def __init__(self, columns: Sequence[Column], more_labels: Sequence[str]) -> None:
        try:
            import pyarrow as pa
        except ImportError:
            message = f"formats arrow and parquet need pyarrow on the server: {how_to_get('tokengrove[export]')}"
            raise UnsupportedParameter(message, param="format") from None
        self._columns = columns
        labels = {name: pa.string() for name in (*_TEXTS, *_JSON_LABELS)}
        places = {name: pa.int64() for name in ("start", "length", "width", "height")}
        place = pa.struct({"digest": pa.string(), **places, "detail": pa.string()})
        labels |= {"interaction_ids": pa.list_(pa.string()), "masked_tokens": pa.int64(), "recomputable": pa.string()}
        labels |= {"rewarded": pa.bool_(), "score": pa.float64()}
        rare = {"truncated_tokens": pa.int64(), "images": pa.list_(place)}
        labels |= {name: rare.get(name, pa.string()) for name in more_labels}
        arrays = {column.name: pa.list_(pa.from_numpy_dtype(column.dtype)) for column in columns}
        self.schema: pa.Schema = pa.schema(list((labels | arrays).items()))
        self._labels = labels

    def batches(self, rows: Iterable[SampleRow]) -> Iterator[pa.RecordBatch]:
        """The rows of a session as record batches, at least one; a row is released when it is in a batch."""
        labels: list[Labels] = []
        columns: list[Columns] = []
        size = 0
        for row in rows:
            if size >= _GROUP_BYTES:
                yield self._batch(labels, columns)
                labels, columns, size = [], [], 0
            labels.append(_flat(row.labels()))
            columns.append(row.columns())
            size += sum(values.nbytes for values in columns[-1].values())
        yield self._batch(labels, columns)

    def _batch(self, labels: Sequence[Labels], found: Sequence[Columns]) -> pa.RecordBatch:
        import pyarrow as pa

        arrays = [pa.array([each[name] for each in labels], kind) for name, kind in self._labels.items()]
        arrays += [_lists(column, [each.get(column.name) for each in found]) for column in self._columns]
        return pa.record_batch(arrays, schema=self.schema)


def _flat(labels: Labels) -> Labels:
    return {"images": None, **labels, **{name: dumps(labels[name]).decode() for name in _JSON_LABELS}}


def _lists(column: Column, values: Sequence[Any]) -> pa.Array:
    """Make a list array; a value None becomes null."""
    import pyarrow as pa

    present = [value for value in values if value is not None]
    offsets = np.cumsum([0, *(0 if value is None else len(value) for value in values)], dtype=np.int32)
    flat = np.concatenate(present) if present else np.zeros(0, column.dtype)
    mask = pa.array([value is None for value in values]) if len(present) < len(values) else None
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(flat.astype(column.dtype, copy=False)), mask=mask)


class ArrowEncoder:
    """An Arrow IPC stream, session after session."""

    media_type = "application/vnd.apache.arrow.stream"

    def __init__(self, columns: Sequence[Column], more_labels: Sequence[str]) -> None:
        self._batches = RecordBatches(columns, more_labels)
        import pyarrow as pa

        self._outgoing = Outgoing()
        self._writer = pa.ipc.new_stream(self._outgoing, self._batches.schema)

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Iterator[bytes]:
        batches = self._batches.batches(rows)
        last = next(batches)
        for batch in batches:
            self._writer.write_batch(last)
            yield self._outgoing.take()
            last = batch
        self._writer.write_batch(last, custom_metadata={"sessions": dumps([entry])})
        yield self._outgoing.take()

    def finish(self, end: Fields) -> Iterator[bytes]:
        told = {name: dumps(value) for name, value in end.items()}
        self._writer.write_batch(next(self._batches.batches(())), custom_metadata=told)
        self._writer.close()
        yield self._outgoing.take()

    def close(self) -> None:
        self._writer.close()


class ParquetEncoder:
    """A Parquet file; a row group holds many sessions."""

    media_type = "application/vnd.apache.parquet"

    def __init__(self, columns: Sequence[Column], more_labels: Sequence[str]) -> None:
        self._batches = RecordBatches(columns, more_labels)
        from pyarrow import parquet

        self._outgoing = Outgoing()
        self._entries: list[Entry] = []
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0
        names = {column.name for column in columns} | set(_TEXTS)
        self._writer = parquet.ParquetWriter(
            self._outgoing,
            self._batches.schema,
            compression="lz4",
            use_dictionary=[_path(name) for name in _REPETITIVE if name in names],
            write_statistics=False,
        )

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Iterator[bytes]:
        self._entries.append(entry)
        for batch in self._batches.batches(rows):
            self._waiting.append(batch)
            self._waiting_bytes += batch.nbytes
            if self._waiting_bytes >= _GROUP_BYTES:
                self._write_group()
                yield self._outgoing.take()

    def finish(self, end: Fields) -> Iterator[bytes]:
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


def _path(name: str) -> str:
    """The path of a column in the Parquet schema: the items of a list are nested below it."""
    return name if name in _TEXTS else f"{name}.list.element"
