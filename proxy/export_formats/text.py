"""The JSON formats: one object (json), or one object per line (jsonl), whose last line proves that it is whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from proxy.export_formats.encoder import Entry, Fields, dumps
from proxy.trajectory.outline import outline
from proxy.trajectory.sample_row import Columns, Labels, SampleRow


class JsonEncoder:
    """`{"samples": [...], "sessions": [entry], "cursor"}`. `outlined`: samples have runs instead of arrays."""

    media_type = "application/json"

    def __init__(self, *, outlined: bool = False) -> None:
        self._value = outline if outlined else _whole
        self._entries: list[Entry] = []
        self._between = b'{"samples":['

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Iterator[bytes]:
        self._entries.append(entry)
        for row in rows:
            yield self._between + dumps(self._value(row))
            self._between = b","

    def finish(self, end: Fields) -> Iterator[bytes]:
        opening = b"" if self._between == b"," else self._between
        yield opening + b'],"sessions":' + dumps(self._entries) + b"," + dumps(end)[1:]

    def close(self) -> None:
        self._entries.clear()


class JsonlEncoder:
    """One sample per line; the last line is `{"sessions": [entry], "cursor"}`. `outlined` as of `JsonEncoder`."""

    media_type = "application/x-ndjson"

    def __init__(self, *, outlined: bool = False) -> None:
        self._value = outline if outlined else _whole
        self._entries: list[Entry] = []

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Iterator[bytes]:
        self._entries.append(entry)
        for row in rows:
            yield dumps(self._value(row)) + b"\n"

    def finish(self, end: Fields) -> Iterator[bytes]:
        yield dumps({"sessions": self._entries, **end}) + b"\n"

    def close(self) -> None:
        self._entries.clear()


def _whole(row: SampleRow) -> Labels | Columns:
    return {**row.labels(), **row.columns()}
