"""The format of an archive file: Parquet with one row per turn, of which a dump's entries are rebuilt exactly.

A row has readable columns, and the rest of the turn in `record`. The first row of a session also has `session`: the
session's entry of a dump, without its turns. A session without turns has one row, in which `interaction_id` is null.
Side columns are in the row of their turn; an image is in the first row of the first session of the file that has it.
Token ids and logprobs are stored once, in readable columns. Pages have checksums.

The metadata of the file has the version of the format. A reader ignores columns that a later minor version adds, and
refuses another major version.
"""

from __future__ import annotations

import base64
import hashlib
import time
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, Self

import numpy as np
import orjson

from proxy.store import dump, migrations
from proxy.store.sql import rows
from proxy.store.sql.tables import interactions, sessions
from proxy.types import Interaction
from tokengrove.errors import ConfigurationError, how_to_get
from tokengrove.reasons import Status

if TYPE_CHECKING:
    import pyarrow as pa

VERSION = (1, 0)
"""The version of the format: major, minor."""
Entries = list[dict[str, Any]]
"""The entries of a session as in a dump: its images, its side columns, then the session itself."""

_VERSION_KEY, _REVISION_KEY = b"tokengrove_archive", b"tokengrove_revision"
# A row group is written at this size in bytes; reader and writer have about one in memory.
_GROUP_BYTES = 8 << 20
_ROWS_AT_ONCE = 16
# The fields of an interaction with columns of the same name.
_SAME = (
    *("parent_id", "seq", "model", "route", "purpose", "agent", "aligned", "trainable", "prefix_length"),
    *("prompt_tokens", "reward", "created_at", "completed_at"),
)
# The columns of a turn that readable columns store exactly, by the readable column and its type.
_EXACT = {"prompt_ids": ("prompt_suffix", "<i4"), "output_ids": ("output_ids", "<i4"), "logprobs": ("logprobs", "<f4")}


def load_pyarrow() -> Any:
    """The module `pyarrow`. Raises ConfigurationError if it is not installed."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigurationError(f"an archive needs pyarrow: {how_to_get('tokengrove[archive]')}") from None
    return pyarrow


def digest_of(entries: Iterable[Mapping[str, Any]]) -> bytes:
    """A digest of the entries of a session without its images, which have digests of their own."""
    digest = hashlib.sha256()
    for entry in entries:
        if "image" not in entry:
            digest.update(orjson.dumps(entry, option=orjson.OPT_SORT_KEYS))
    return digest.digest()


class ArchiveWriter:
    """Writes sessions to a file, which is complete when the `with` block has ended.

    `size`: the approximate bytes that were added, before compression. `images`: the digests of the images in the file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        """Raises ConfigurationError if pyarrow is not installed."""
        load_pyarrow()
        from pyarrow import parquet

        self.size = self._waiting_bytes = 0
        self._schema = _schema()
        self._rows: list[dict[str, Any]] = []
        self.images: set[str] = set()
        self._writer = parquet.ParquetWriter(
            *(file, self._schema), compression="zstd", write_page_checksum=True, use_dictionary=_REPETITIVE
        )

    def add(self, entries: Entries) -> None:
        """Add a session. Raises an error of `inspection.BROKEN` if a row cannot be decoded."""
        new = [entry["image"] for entry in entries if "image" in entry and entry["image"]["digest"] not in self.images]
        found = _rows_of(entries, new)
        self.images.update(image["digest"] for image in new)
        for row in found:
            self._rows.append(row)
            size = _size_of(row)
            self.size += size
            self._waiting_bytes += size
            if self._waiting_bytes >= _GROUP_BYTES:
                self._flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Write what is left, and the footer. After an error the file is of no use."""
        if kind is None:
            self._flush()
        self._writer.close()

    def _flush(self) -> None:
        import pyarrow as pa

        if self._rows:
            self._writer.write_table(pa.Table.from_pylist(self._rows, self._schema))
        self._rows, self._waiting_bytes = [], 0


class ArchiveReader:
    """Reads the sessions of a file. Raises ConfigurationError, which names the file, if it cannot be read."""

    def __init__(self, file: Any, name: str) -> None:
        pyarrow = load_pyarrow()
        from pyarrow import parquet

        self.name, self._broken = name, (pyarrow.ArrowException, OSError, KeyError, ValueError, TypeError)
        try:
            self._file = parquet.ParquetFile(file, page_checksum_verification=True)
        except self._broken as error:
            raise self._damaged(error) from None
        told = self._file.schema_arrow.metadata or {}
        self._check(told)
        self.revision = told.get(_REVISION_KEY, b"").decode()

    def names(self) -> list[str]:
        """The ids of the sessions, each once, in order."""
        try:
            found = self._file.read(columns=["session_id"]).column("session_id").to_pylist()
        except self._broken as error:
            raise self._damaged(error) from None
        return list(dict.fromkeys(found))

    def sessions(self, wanted: Collection[str] | None = None) -> Iterator[Entries]:
        """Yield the entries of each session, or of each `wanted` one, with one in memory at a time.

        Each image comes with the first of the yielded sessions that has it.
        """
        needed = None if wanted is None else self._digests(wanted)
        images: dict[str, dict[str, Any]] = {}
        columns: Entries = []
        session: dict[str, Any] | None = None
        for row in self._rows(wanted, needed):
            for image in row["images"] or ():
                if needed is None or image["digest"] in needed:
                    images[image["digest"]] = {"image": _packed(image)}
            if wanted is not None and row["session_id"] not in wanted:
                continue
            if (text := row["session"]) is not None:
                if session is not None:
                    yield _whole(session, columns, images)
                columns, session = [], {**orjson.loads(text), "interactions": []}
            if session is None:
                raise self._damaged("its first row begins no session")
            if row["interaction_id"] is not None:
                columns += [{"side_column": _column_of(row, each)} for each in row["side_columns"] or ()]
                session["interactions"].append(_turn_of(row))
        if session is not None:
            yield _whole(session, columns, images)

    def _digests(self, wanted: Collection[str]) -> set[str]:
        """The digests of the images of some sessions."""
        found: set[str] = set()
        for batch in self._batches(["session_id", "session"]):
            for row in batch.to_pylist():
                if row["session"] is not None and row["session_id"] in wanted:
                    found |= dump.digests_of(orjson.loads(row["session"]))
        return found

    def _rows(self, wanted: Collection[str] | None, needed: set[str] | None) -> Iterator[_Row]:
        groups = None if wanted is None or needed is None else self._groups(wanted, needed)
        for batch in self._batches(None, groups):
            for at in range(batch.num_rows):
                yield _Row(batch, at)

    def _groups(self, wanted: Collection[str], needed: set[str]) -> list[int]:
        """The row groups that have rows of some sessions, or their images."""
        found = []
        for group in range(self._file.num_row_groups):
            for batch in self._batches(["session_id", "images.list.element.digest"], [group]):
                digests = (image["digest"] for images in batch.column("images").to_pylist() for image in images or ())
                if any(name in wanted for name in batch.column("session_id").to_pylist()) or any(
                    digest in needed for digest in digests
                ):
                    found.append(group)
                    break
        return found

    def _batches(self, columns: list[str] | None, groups: list[int] | None = None) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._file.iter_batches(_ROWS_AT_ONCE, groups, columns)
        except self._broken as error:
            raise self._damaged(error) from None

    def _check(self, told: Mapping[bytes, bytes]) -> None:
        version = told.get(_VERSION_KEY)
        if version is None:
            raise ConfigurationError(f"{self.name} is not an archive of tokengrove")
        if version.partition(b".")[0] != b"%d" % VERSION[0]:
            raise ConfigurationError(
                f"{self.name} has the archive format {version.decode(errors='replace')}, and this tokengrove reads "
                f"{VERSION[0]}.x: use the release that wrote it"
            )

    def _damaged(self, why: object) -> ConfigurationError:
        return ConfigurationError(f"the archive file {self.name} is damaged or cannot be read: {why}")


def _schema() -> pa.Schema:
    import pyarrow as pa

    text, whole, real, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    ids, column = pa.list_(pa.int32()), {name: text for name in ("name", "dtype", "shape")}
    column |= {"start": whole, "number": whole, "checksum": pa.binary(), "data": pa.large_binary()}
    image = {name: text for name in ("digest", "media_type", "pixels")}
    image |= {"width": whole, "height": whole, "size": whole, "created_at": real, "data": pa.large_binary()}
    fields: dict[str, Any] = {
        **dict.fromkeys(("session_id", "task_id", "group_id", "session_status", "outcome"), text),
        **{"ended_at": real, "turn": whole, "interaction_id": text, "parent_id": text, "seq": whole},
        **dict.fromkeys(("status", "reason", "api", "model", "route", "purpose", "agent", "finish_reason"), text),
        **{"aligned": flag, "trainable": flag, "prefix_length": whole, "prompt_tokens": whole},
        **{"prompt_ids": ids, "output_ids": ids, "logprobs": pa.list_(pa.float32()), "versions": pa.list_(whole)},
        **{"reward": real, "created_at": real, "completed_at": real, "messages": text, "output": text},
        **{"side_columns": pa.list_(pa.struct(column)), "images": pa.list_(pa.struct(image))},
        **{"record": pa.binary(), "session": pa.binary()},
    }
    told = {_VERSION_KEY: b"%d.%d" % VERSION, _REVISION_KEY: migrations.head().encode()}
    return pa.schema(list(fields.items()), {**told, b"created_at": repr(time.time()).encode()})


# Columns with few distinct values, for which a dictionary is small.
_REPETITIVE = [
    *("session_id", "task_id", "group_id", "session_status", "outcome", "status", "reason", "api", "model", "route"),
    *("purpose", "agent", "finish_reason", "versions.list.element"),
]


def _rows_of(entries: Entries, images: Entries) -> list[dict[str, Any]]:
    """The rows of a session, with its new images in the first one."""
    entry = entries[-1]
    record = entry["session"]
    of_session = {name: record.get(name) for name in ("session_id", "task_id", "group_id", "outcome", "ended_at")}
    of_session["session_status"] = record["status"]
    beside: dict[str, Entries] = {}
    for each in entries:
        if "side_column" in each:
            column = each["side_column"]
            beside.setdefault(column["interaction_id"], []).append(column)
    found, turn = [], 0
    for row in entry["interactions"]:
        values = dump.decode_row(interactions, row)
        node = rows.interaction_of(values)
        complete = node.status is Status.COMPLETE
        readable = _readable(node, values, turn if complete else None)
        turn += complete
        columns = [_unpacked(column) for column in beside.pop(node.id, ())]
        found.append({**of_session, **readable, "record": _record(row), "side_columns": columns or None})
    if beside:
        raise ValueError(f"a side column belongs to the interaction {min(beside)}, which is missing")
    found = found or [dict(of_session)]
    rows.session_of(dump.decode_row(sessions, {"number": 0, **record}))
    rest = {name: value for name, value in entry.items() if name != "interactions"}
    found[0] |= {"session": orjson.dumps(rest), "images": [_unpacked(image) for image in images] or None}
    return found


def _readable(node: Interaction, values: Mapping[str, Any], turn: int | None) -> dict[str, Any]:
    found: dict[str, Any] = {name: getattr(node, name) for name in _SAME}
    for name, (stored, dtype) in _EXACT.items():
        found[name] = np.frombuffer(values[stored], dtype)
    found |= {name: values[name] for name in ("status", "reason", "api", "finish_reason")}
    counts, versions = zip(*node.versions, strict=True) if node.versions else ((), ())
    found |= {"turn": turn, "interaction_id": node.id, "versions": np.repeat(np.asarray(versions, np.int64), counts)}
    return found | {"messages": _text_of(values["new_messages"]), "output": _text_of(values["output"])}


def _text_of(data: bytes | None) -> str | None:
    """The JSON text that `codec.encode_json` made bytes of."""
    if data is None:
        return None
    return (zlib.decompress(data[1:]) if data[:1] in b"zZ" else data[1:]).decode()


def _record(row: Mapping[str, Any]) -> bytes:
    exact = {stored for stored, _ in _EXACT.values()}
    return orjson.dumps({name: value for name, value in row.items() if name not in exact})


class _Row:
    """A row of a batch. Only the columns that are asked for become objects of Python."""

    def __init__(self, batch: pa.RecordBatch, at: int) -> None:
        self._batch, self._at = batch, at

    def __getitem__(self, name: str) -> Any:
        return self._batch.column(name)[self._at].as_py()

    def array(self, name: str, dtype: str) -> bytes:
        """The values of a list as bytes."""
        values = self._batch.column(name)[self._at].values
        return bytes(np.ascontiguousarray(values.to_numpy(zero_copy_only=False), dtype=dtype).tobytes())


def _whole(session: dict[str, Any], columns: Entries, images: dict[str, dict[str, Any]]) -> Entries:
    """The entries of a session, with those of its images that are in `images`, which it takes out."""
    own = [images.pop(digest) for digest in sorted(dump.digests_of(session) & images.keys())]
    return [*own, *columns, session]


def _turn_of(row: _Row) -> dict[str, Any]:
    """The row of an interaction as in a dump."""
    arrays = {stored: row.array(name, dtype) for name, (stored, dtype) in _EXACT.items()}
    return {**orjson.loads(row["record"]), **{name: _text(data) for name, data in arrays.items()}}


def _column_of(row: _Row, values: dict[str, Any]) -> dict[str, Any]:
    return {**_packed(values), "session_id": row["session_id"], "interaction_id": row["interaction_id"]}


_OF_A_COLUMN = ("session_id", "interaction_id")
_BYTES = ("data", "checksum")


def _unpacked(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a dump with its bytes as such."""
    return {
        name: base64.b64decode(value) if name in _BYTES else value
        for name, value in row.items()
        if name not in _OF_A_COLUMN
    }


def _packed(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row of a dump that `_unpacked` was given."""
    return {name: _text(value) if name in _BYTES else value for name, value in row.items() if value is not None}


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _size_of(row: Mapping[str, Any]) -> int:
    size: int = sum(row[name].nbytes for name in (*_EXACT, "versions") if name in row)
    size += sum(len(row.get(name) or b"") for name in ("record", "session", "messages", "output"))
    return size + sum(len(each["data"]) for name in ("images", "side_columns") for each in row.get(name) or ())
