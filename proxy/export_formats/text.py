"""The JSON formats: one object (json), or one object per line (jsonl), whose last line proves that it is complete.

Images come after the samples: in `json` as the object `images`, by digest; in `jsonl` as one line
`{"image": digest, ...}` each. Both have none if no sample contains an image, or if images were not requested.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable

from proxy.export_formats.encoder import Entry, Fields, dumps
from proxy.export_formats.image_table import ImageEntry, ImageTable, Pieces, WantedImage, given
from proxy.trajectory.outline import outline
from proxy.trajectory.sample_row import Columns, Labels, SampleRow


class JsonEncoder:
    """`{"samples": [...], "images", "sessions": [entry], "cursor"}`. `outlined`: samples have runs instead of
    arrays."""

    media_type = "application/json"

    def __init__(self, images: ImageTable, *, outlined: bool = False) -> None:
        self._value = outline if outlined else _whole
        self._images = images
        self._entries: list[Entry] = []
        self._between = b'{"samples":['

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        self._entries.append(entry)
        for row in rows:
            self._images.note(row)
            yield self._between + dumps(self._value(row))
            self._between = b","

    def finish(self, end: Fields) -> Pieces:
        opening = b"" if self._between == b"," else self._between
        yield opening + b"]"
        yield from image_object(self._images)
        yield b',"sessions":' + dumps(self._entries) + b"," + dumps(end)[1:]

    def close(self) -> None:
        self._entries.clear()


class JsonlEncoder:
    """One sample per line. The last line is `{"sessions": [entry], "cursor"}`. `outlined`: as in `JsonEncoder`."""

    media_type = "application/x-ndjson"

    def __init__(self, images: ImageTable, *, outlined: bool = False) -> None:
        self._value = outline if outlined else _whole
        self._images = images
        self._entries: list[Entry] = []

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        self._entries.append(entry)
        for row in rows:
            self._images.note(row)
            yield dumps(self._value(row)) + b"\n"

    def finish(self, end: Fields) -> Pieces:
        for wanted in self._images.wanted():
            yield dumps({"image": wanted.digest, **self._images.told(given((yield wanted)))}) + b"\n"
        yield dumps({"sessions": self._entries, **end}) + b"\n"

    def close(self) -> None:
        self._entries.clear()


def image_object(images: ImageTable) -> Generator[bytes | WantedImage, ImageEntry | None, None]:
    """The field `images` of an object, with a comma before it, piece by piece; nothing without images."""
    between = b',"images":{'
    for wanted in images.wanted():
        yield between + dumps(wanted.digest) + b":" + dumps(images.told(given((yield wanted))))
        between = b","
    if between == b",":
        yield b"}"


def _whole(row: SampleRow) -> Labels | Columns:
    return {**row.labels(), **row.columns()}
