"""Reading an export in any format: an answer in memory, a file, or a folder of pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from zipfile import BadZipFile

from proxy.client.libraries import library
from proxy.client.readers.arrays import read_npz, read_safetensors
from proxy.client.readers.arrow import read_arrow, read_parquet
from proxy.client.readers.page import Page, Source
from proxy.client.readers.text import read_areal, read_json, read_jsonl
from proxy.client.values import Export
from proxy.errors import InvalidRequest

READERS: dict[str, Callable[[Source], Page]] = {
    "json": read_json,
    "jsonl": read_jsonl,
    "areal": read_areal,
    "npz": read_npz,
    "safetensors": read_safetensors,
    "arrow": read_arrow,
    "parquet": read_parquet,
}
# What the readers meet in bytes that are no export, or a part of one; pyarrow's errors are of these classes.
_BROKEN = (ValueError, LookupError, TypeError, EOFError, OSError, BadZipFile)


def read(source: bytes | str | Path, format: str) -> Export:
    """The samples and the entries of sessions that an export holds, whatever its format.

    `source` is the bytes of one answer, a file that has them, or a folder into which `tokengrove export` wrote, all of
    whose pages are read. A file in jsonl that has samples alone has no entries of sessions. Raises InvalidRequest for
    an unknown format, for what cannot be read as it, and where pyarrow is missing that arrow and parquet need.
    """
    check_readable(format)
    if isinstance(source, bytes):
        return read_page(source, format).export
    whole = Export([], {})
    for file in _files(Path(source), format):
        page = read_page(file, format)
        whole.samples.extend(page.samples)
        whole.sessions.update(page.sessions)
    return whole


def read_page(source: Source, format: str) -> Page:
    """One answer, whose arrays may be written to. Raises InvalidRequest."""
    check_readable(format)
    try:
        return READERS[format](source)
    except _BROKEN as error:
        name = source if isinstance(source, Path) else "this"
        told = f"{type(error).__name__}: {error}"
        raise InvalidRequest(f"{name} is no whole export in format {format} ({told})", param="source") from error


def check_readable(format: str) -> None:
    """Raise InvalidRequest for a format that is not known, or that needs a library which is missing."""
    if format not in READERS:
        raise InvalidRequest(f"'format' must be one of {', '.join(READERS)}", param="format")
    if format in ("arrow", "parquet"):
        library("pyarrow")


def _files(path: Path, format: str) -> Iterator[Path]:
    """The file, or the pages of the folder in order. Raises InvalidRequest where there is none."""
    if not path.exists():
        raise InvalidRequest(f"there is no file or folder {path}, so nothing in format {format}", param="source")
    if not path.is_dir():
        yield path
        return
    pages = sorted(path.glob(f"page-*.{suffix(format)}"))
    if not pages:
        raise InvalidRequest(f"{path} holds no page-*.{suffix(format)}", param="source")
    yield from pages


def suffix(format: str) -> str:
    """What a file of the format is called after the dot."""
    return "json" if format == "areal" else format
