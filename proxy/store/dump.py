"""The format of a dump: JSON lines, one for each session with all its rows, between a header and a trailer.

Images and side columns, which are large, have lines of their own, before the session. An archived session is named with
its file and the hashes of its keys. Values are copied as stored, bytes in base64, so an import restores every bit. The
trailer has the counts and the SHA-256 of everything before it, so a truncated or changed dump is detected.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import orjson
from sqlalchemy import LargeBinary, RowMapping, Table

from proxy.store.record_limits import MAX_RECORD_BYTES, read_record
from proxy.store.sql.side_columns import checksum_of
from proxy.store.sql.tables import (
    annotated,
    archived_sessions,
    capacity,
    images,
    intents,
    interactions,
    returns,
    session_images,
    session_routes,
    sessions,
    side_columns,
    unreplied,
    withdrawn_keys,
)
from tokengrove.errors import ConfigurationError

FORMAT = 3  # since 2 with images, each before the first session that has it; since 3 with side columns
COMPRESSED = ".zst"
# Imported in this order, rows refer only to rows that already exist.
PARTS: Mapping[str, Table] = {
    "interactions": interactions,
    "returns": returns,
    "intents": intents,
    "unreplied": unreplied,
    "withdrawn_keys": withdrawn_keys,
    "session_images": session_images,
    "session_routes": session_routes,
    "annotations": annotated,
}
_BYTES = {
    table.name: {c.name for c in table.c if isinstance(c.type, LargeBinary)}
    for table in (*PARTS.values(), sessions, capacity, images, side_columns, archived_sessions)
}


@dataclass(slots=True)
class Totals:
    """Counts and running SHA-256 of the lines of a dump so far."""

    sessions: int = 0
    interactions: int = 0
    images: int = 0
    columns: int = 0
    digest: Any = field(default_factory=hashlib.sha256)

    def add(self, line: bytes, entry: Mapping[str, Any]) -> None:
        """Count a line and its entry."""
        self.digest.update(line)
        self.sessions += "session" in entry
        self.images += "image" in entry
        self.columns += "side_column" in entry
        self.interactions += len(entry.get("interactions", ()))

    def to_json(self) -> dict[str, Any]:
        """The trailer of the dump."""
        counts = {"sessions": self.sessions, "interactions": self.interactions}
        if self.images:
            counts["images"] = self.images
        if self.columns:
            counts["side_columns"] = self.columns
        return {**counts, "sha256": self.digest.hexdigest()}


def encode_row(table: Table, row: RowMapping) -> dict[str, Any]:
    """A row as JSON: bytes in base64; NULL columns and the `number` of a session are left out."""
    binary, own = _BYTES[table.name], "number" if table is sessions else None
    return {
        str(name): base64.b64encode(value).decode() if name in binary else value
        for name, value in row.items()
        if value is not None and name != own
    }


def decode_row(table: Table, row: Mapping[str, Any]) -> dict[str, Any]:
    """The column values of a row, with None for nullable columns that are missing. Raises ValueError or TypeError."""
    binary, unknown = _BYTES[table.name], row.keys() - table.c.keys()
    if unknown:
        raise ValueError(f"{table.name} has no column {min(unknown)}")
    values: dict[str, Any] = {column.name: None for column in table.c if column.nullable}
    given = {name: base64.b64decode(value, validate=True) if name in binary else value for name, value in row.items()}
    return {**values, **given}


def session_parts(entry: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows of a session's entry by part. Raises KeyError if it is damaged.

    Dumps of databases before revision 0004 have the time of the reply in each interaction instead of `unreplied`. Dumps
    before 0008 have no withdrawn keys, dumps before 0013 no images, dumps before 0019 no routes, and dumps before 0020
    no annotations.
    """
    entry = {"withdrawn_keys": [], "session_images": [], "session_routes": [], "annotations": [], **entry}
    if "unreplied" in entry:
        return {part: entry[part] for part in PARTS}
    late = [row for row in entry["interactions"] if row["status"] == "complete" and "replied_at" not in row]
    return {
        "interactions": [{k: v for k, v in row.items() if k != "replied_at"} for row in entry["interactions"]],
        "returns": entry["returns"],
        "intents": entry["intents"],
        "unreplied": [{"interaction_id": row["id"], "session_id": row["session_id"]} for row in late],
        "withdrawn_keys": entry["withdrawn_keys"],
        "session_images": entry["session_images"],
        "session_routes": entry["session_routes"],
    }


def decode_image(row: Mapping[str, Any]) -> dict[str, Any]:
    """The column values of an image. Raises ValueError, KeyError or TypeError, also if the digest does not match."""
    values = decode_row(images, row)
    if hashlib.sha256(values["data"]).hexdigest() != values["digest"]:
        raise ValueError("its bytes have another digest")
    return values


def decode_column(row: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a side column. Raises ValueError, KeyError or TypeError, also if the checksum does not match."""
    values = decode_row(side_columns, row)
    if checksum_of(values) != values["checksum"]:
        raise ValueError("its checksum differs")
    return values


def digests_of(entry: Mapping[str, Any]) -> set[str]:
    """The digests of the images in a session's entry."""
    return {row["digest"] for row in entry.get("session_images", ())}


def entries(source: IO[bytes], name: str, most: int = MAX_RECORD_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the header and the entries of a dump, with one in memory at a time. `most`: the most bytes of a line.

    Raises ConfigurationError, which names the first line that is damaged or too large. The checksum is checked at the
    end: do not rely on any entry before the iterator has ended.
    """
    totals, number = Totals(), 0
    while line := read_record(source, number := number + 1, name, most):
        entry = _parsed(line, number, name)
        if number == 1 and entry.get("tokengrove") != "dump":
            raise ConfigurationError(f"{name} is not a dump; tokengrove export --all writes one")
        if "end" in entry:
            if entry["end"] != totals.to_json():
                raise ConfigurationError(f"{name} is damaged: its counts or its checksum differ from its trailer")
            return
        totals.add(line, entry)
        del line  # keep neither the line next to its entry, nor the entry while reading the next
        yield entry
        del entry
    raise ConfigurationError(f"{name} is truncated: its trailer is missing")


def _parsed(line: bytes, number: int, name: str) -> dict[str, Any]:
    try:
        entry = orjson.loads(line)
        if not isinstance(entry, dict):
            raise ValueError("not an object")
    except ValueError as error:
        raise ConfigurationError(f"{name} is damaged at line {number}: {error}") from None
    return entry


@contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """Open a dump for reading, compressed if it is named *.zst. Raises ConfigurationError."""
    import zstandard

    try:
        with path.open("rb") as file:
            if path.suffix == COMPRESSED:
                with zstandard.ZstdDecompressor().stream_reader(file) as plain:
                    yield io.BufferedReader(plain)
            else:
                yield file
    except zstandard.ZstdError as error:
        raise ConfigurationError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from None


@contextmanager
def writing(name: str) -> Iterator[IO[bytes]]:
    """Open the output of a dump; `-` is standard output. A file gets its name when it is complete.

    A new file is private to its owner (0600); an overwritten file keeps its mode.

    Raises ConfigurationError.
    """
    if name == "-":
        yield sys.stdout.buffer
        return
    path = Path(name)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            if path.exists():
                part.chmod(path.stat().st_mode & 0o777)
            if path.suffix == COMPRESSED:
                import zstandard

                with zstandard.ZstdCompressor(level=6).stream_writer(file, closefd=False) as compressed:
                    yield compressed
            else:
                yield file
        part.replace(path)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        part.unlink(missing_ok=True)
