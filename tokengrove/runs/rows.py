"""The rows of a data file, with their places in the file for error messages."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from tokengrove.client.image_urls import image_url, is_image
from tokengrove.errors import ConfigurationError

Row = dict[str, Any]
Rows = Iterator[tuple[str, Row]]
"""The place of a row ("data.jsonl, line 3"), and the row in JSON's types."""


def rows_of(path: Path) -> Rows:
    """Yield the rows of a .jsonl, .json, .csv or .parquet file, in order.

    Raises ConfigurationError for a file that cannot be read or has another format, and for a row that is not an object.
    """
    read = _KINDS.get(path.suffix.lower())
    if read is None:
        raise ConfigurationError(f"--data {path}: a file of tasks ends with {', '.join(_KINDS)}")
    try:
        yield from read(path)
    except OSError as error:
        raise ConfigurationError(f"--data {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--data {path} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def in_json(place: str, row: object) -> Row:
    """The row in JSON's types. Images in bytes, as in tables, become data URLs.

    Raises ConfigurationError for a row that is not a mapping, or that JSON cannot express.
    """
    if not isinstance(row, Mapping):
        raise ConfigurationError(f"{place}: a task is an object with fields, not {type(row).__name__}")
    try:
        plain: Row = orjson.loads(orjson.dumps(dict(row), default=_plain, option=orjson.OPT_SERIALIZE_NUMPY))
    except TypeError as error:
        raise ConfigurationError(f"{place}: JSON cannot express this task: {error}") from None
    return plain


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, bytes) and is_image(value):
        return image_url(value)
    raise TypeError(f"{type(value).__name__} {value!r:.80}")


def _jsonl(path: Path) -> Rows:
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            place = f"{path}, line {number}"
            yield place, in_json(place, _parsed(line, place))


def _json(path: Path) -> Rows:
    listed = _parsed(path.read_text(encoding="utf-8-sig"), str(path))
    if not isinstance(listed, list):
        raise ConfigurationError(f"{path}: a .json file of tasks is a list; for one object a line, name it .jsonl")
    for number, row in enumerate(listed, 1):
        place = f"{path}, item {number}"
        yield place, in_json(place, row)


def _parsed(text: str, place: str) -> object:
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError as error:
        within = f", column {error.colno}" if error.lineno == 1 else f", line {error.lineno}, column {error.colno}"
        raise ConfigurationError(f"{place}{within}: this is not JSON: {error.msg}") from None


def _csv(path: Path) -> Rows:
    """Yield the rows of a .csv file. Values are text. The first line names the fields."""
    reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8-sig"), newline=""), strict=True)
    try:
        for row in reader:
            place = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise ConfigurationError(f"{place}: the row has not as many fields as the first line names")
            yield place, row
    except csv.Error as error:
        raise ConfigurationError(f"{path}, line {reader.line_num}: {error}") from None


def _parquet(path: Path) -> Rows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise ConfigurationError(f"--data {path}: .parquet files need pyarrow; install it, or give .jsonl") from None
    try:
        table = parquet.read_table(path)
    except ArrowException as error:
        raise ConfigurationError(f"--data {path}: {error}") from None
    for number, row in enumerate(table.to_pylist(), 1):
        place = f"{path}, row {number}"
        yield place, in_json(place, row)


_KINDS: dict[str, Callable[[Path], Rows]] = {".jsonl": _jsonl, ".json": _json, ".csv": _csv, ".parquet": _parquet}
