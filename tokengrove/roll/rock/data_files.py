"""The rows of a data set: from a file, all files of a folder, a list of files, or a data set of the hub."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokengrove.errors import InvalidRequest

Row = dict[str, Any]


def read_rows(name: str | Sequence[str], split: str = "train", options: Mapping[str, Any] | None = None) -> list[Row]:
    """Read all rows of `name`, in the order of the file; for a folder, its files in the order of their names.

    The suffix determines the format: jsonl, json (a list of objects, or one per line), csv, txt (rows with `text`),
    parquet and arrow (these need pyarrow). A name that is not a path is a data set of the hub, which needs `datasets`;
    `split` and `options` are passed to that package. Raises InvalidRequest for files of several or unknown formats, and
    for a line that is not an object.
    """
    files = _files(name)
    if files is None:
        return _of_hub(str(name), split, options or {})
    kinds = {_KINDS.get(file.suffix) for file in files}
    if len(kinds) != 1 or None in kinds:
        endings = ", ".join(sorted({file.suffix or file.name for file in files})) or "none"
        raise InvalidRequest(
            f"'dataset_name': {name!r} needs files of one kind, of {', '.join(_KINDS)}; it has {endings}",
            param="dataset_name",
        )
    return [row for file in files for row in _KINDS[file.suffix](file)]


def _files(name: str | Sequence[str]) -> list[Path] | None:
    """The files of `name`; None if it is neither a file nor a folder."""
    if not isinstance(name, str):
        return [Path(each) for each in name]
    path = Path(name).expanduser()
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file() and not file.name.startswith("."))
    return [path] if path.is_file() else None


def _jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _object(line, f"{file}, line {number}")


def _json(file: Path) -> Iterator[Row]:
    text = file.read_text(encoding="utf-8")
    if not text.lstrip().startswith("["):
        yield from _jsonl(file)
        return
    for number, row in enumerate(_value(text, str(file))):
        if not isinstance(row, dict):
            raise InvalidRequest(f"'dataset_name': {file}[{number}] is not an object", param="dataset_name")
        yield row


def _value(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"'dataset_name': {where}: {error}", param="dataset_name") from None


def _object(text: str, where: str) -> Row:
    row = _value(text, where)
    if not isinstance(row, dict):
        raise InvalidRequest(f"'dataset_name': {where} is not an object", param="dataset_name")
    return row


def _csv(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8", newline="") as lines:
        yield from csv.DictReader(lines)


def _text(file: Path) -> Iterator[Row]:
    return ({"text": line} for line in file.read_text(encoding="utf-8").splitlines())


def _parquet(file: Path) -> Iterator[Row]:
    import pyarrow.parquet

    yield from pyarrow.parquet.read_table(file).to_pylist()


def _arrow(file: Path) -> Iterator[Row]:
    import pyarrow

    with pyarrow.memory_map(str(file)) as source:
        try:
            table = pyarrow.ipc.open_stream(source).read_all()  # the format of `datasets`
        except pyarrow.ArrowInvalid:
            table = pyarrow.ipc.open_file(source).read_all()
        yield from table.to_pylist()


_KINDS: dict[str, Callable[[Path], Iterator[Row]]] = {
    ".jsonl": _jsonl,
    ".json": _json,
    ".csv": _csv,
    ".txt": _text,
    ".parquet": _parquet,
    ".arrow": _arrow,
}


def _of_hub(name: str, split: str, options: Mapping[str, Any]) -> list[Row]:
    try:
        import datasets
    except ModuleNotFoundError:
        raise InvalidRequest(
            f"'dataset_name': there is no file or folder {name!r}; a data set of the hub needs `pip install datasets`",
            param="dataset_name",
        ) from None
    return list(datasets.load_dataset(name, split=split, **options))
