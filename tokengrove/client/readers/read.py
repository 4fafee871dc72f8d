"""Reads an export in any format: from memory, from a file, or from a folder of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import BadZipFile

from tokengrove.client.export import Export
from tokengrove.client.libraries import library
from tokengrove.client.readers.arrays import read_npz, read_safetensors
from tokengrove.client.readers.arrow import read_arrow, read_parquet
from tokengrove.client.readers.page import Page, Source
from tokengrove.client.readers.text import read_areal, read_json, read_jsonl
from tokengrove.errors import InvalidRequest

READERS: dict[str, Callable[[Source], Page]] = {
    "json": read_json,
    "jsonl": read_jsonl,
    "areal": read_areal,
    "npz": read_npz,
    "safetensors": read_safetensors,
    "arrow": read_arrow,
    "parquet": read_parquet,
}
# Errors of the readers for bytes that are not an export or are truncated. pyarrow's errors are of these classes.
_BROKEN = (ValueError, LookupError, TypeError, EOFError, OSError, BadZipFile)


def read(source: bytes | str | Path, format: str) -> Export:
    """Read the samples and session entries of an export.

    `source` is the bytes of one answer, a file that contains them, or a folder that `tokengrove export` wrote. All
    pages of a folder are read. A jsonl file of `tokengrove export` contains samples only, without session entries.
    Raises InvalidRequest for an unknown format, for bytes that are not a whole export in the format, and if pyarrow is
    missing, which arrow and parquet need.
    """
    check_readable(format)
    if isinstance(source, bytes):
        return read_page(source, format).export
    whole = Export([], {})
    for file in _files(Path(source), format):
        whole.extend(read_page(file, format).export)
    return whole


def read_page(source: Source, format: str) -> Page:
    """Read one answer; its arrays are writable. Raises InvalidRequest if it is not whole."""
    check_readable(format)
    try:
        return READERS[format](source)
    except _BROKEN as error:
        name = source if isinstance(source, Path) else "the answer"
        told = f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"{name} is not a whole export in format {format} ({told})", param="source") from error


def check_readable(format: str) -> None:
    """Raise InvalidRequest for an unknown format, or if its library is missing."""
    if format not in READERS:
        raise InvalidRequest(f"format {format!r} is not one of {', '.join(READERS)}", param="format")
    if format in ("arrow", "parquet"):
        library("pyarrow")


def _files(path: Path, format: str) -> Iterator[Path]:
    """Yield the file, or the pages of the folder in order. Raises InvalidRequest if there is none."""
    if not path.exists():
        raise InvalidRequest(f"there is no file or folder {path} to read in format {format}", param="source")
    if not path.is_dir():
        yield path
        return
    pages = sorted(path.glob(f"page-*.{suffix(format)}"))
    if not pages:
        raise InvalidRequest(
            f"{path} has no file page-*.{suffix(format)}; was it exported in another format?", param="source"
        )
    yield from pages


def suffix(format: str) -> str:
    """The file name extension of the format."""
    return "json" if format == "areal" else format
