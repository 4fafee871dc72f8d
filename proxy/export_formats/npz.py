"""NumPy's `.npz` archive, written as a stream: `numpy.load` reads it without pickle.

The array `metadata` (uint8) is the JSON text `{"samples": [labels of each row], "sessions": [entry], "cursor"}`. If the
answer has images, `metadata` describes each by digest in `images`; the bytes are the arrays `images/DIGEST` (uint8).
"""

from __future__ import annotations

import io
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any, cast
from zipfile import ZipFile, ZipInfo

import numpy as np

from proxy.export_formats.encoder import Entry, Fields, Outgoing, dumps
from proxy.export_formats.image_table import ImageEntry, ImageTable, Pieces, WantedImage, described, given
from proxy.export_formats.spool import Part, Spool, image_parts
from proxy.trajectory.columns import Column
from proxy.trajectory.sample_row import SampleRow


class NpzEncoder:
    """Spools columns to temporary files until the last row, because an archive stores each column as a whole."""

    media_type = "application/zip"

    def __init__(self, columns: Sequence[Column], images: ImageTable) -> None:
        self._spool, self._images = Spool(columns), images

    def add(self, rows: Iterable[SampleRow], entry: Entry) -> Pieces:
        self._spool.entries.append(entry)
        for row in rows:
            self._images.note(row)
            self._spool.add(row)
            yield b""  # lets running turns proceed between two rows

    def finish(self, end: Fields) -> Pieces:
        outgoing = Outgoing()
        with ZipFile(cast(io.BytesIO, outgoing), "w") as archive:
            for part in self._spool.parts():
                yield from _member(archive, outgoing, part)
            told: dict[str, Any] = {}
            for wanted in self._images.wanted():
                told[wanted.digest] = yield from self._image(archive, outgoing, wanted)
            images = {"images": told} if told else {}
            yield from _member(archive, outgoing, self._metadata({**images, **end}))
        yield outgoing.take()

    def close(self) -> None:
        self._spool.close()

    def _image(
        self, archive: ZipFile, outgoing: Outgoing, wanted: WantedImage
    ) -> Generator[bytes | WantedImage, ImageEntry | None, dict[str, Any]]:
        """Write the arrays of an image. Return its description."""
        entry = given((yield wanted))
        for part in image_parts(entry, has_bytes=self._images.has_bytes):
            yield from _member(archive, outgoing, part)
        return described(entry.file)

    def _metadata(self, end: Fields) -> Part:
        spool = self._spool
        text = b'{"samples":' + spool.samples_json() + b',"sessions":' + spool.sessions_json()
        text += b"," + dumps(end)[1:]
        return Part("metadata", np.dtype(np.uint8), (len(text),), text)


def _member(archive: ZipFile, outgoing: Outgoing, part: Part) -> Iterator[bytes]:
    # Zip64: sizes are written after the data, and may not fit 32 bits.
    with archive.open(ZipInfo(f"{part.name}.npy"), "w", force_zip64=True) as member:
        header = {"descr": part.dtype.str, "fortran_order": False, "shape": part.shape}
        np.lib.format.write_array_header_1_0(cast(io.BytesIO, member), header)
        for chunk in part.chunks():
            member.write(chunk)
            yield outgoing.take()
    yield outgoing.take()
