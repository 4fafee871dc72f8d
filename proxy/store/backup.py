"""Exports a whole database to a file and imports it again, on SQLite and PostgreSQL, without loss.

An export reads one snapshot, even while a server writes. An import checks the whole file first, then adds each session
in one transaction; after a crash, importing the file again completes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO, Any

import orjson
from sqlalchemy import Connection, Engine, RowMapping, Table, exists, func, insert, select
from sqlalchemy.exc import IntegrityError, SQLAlchemyError

from proxy.store import database, dump, migrations, schema
from proxy.store.faults import reason_of
from proxy.store.record_limits import MAX_RECORD_BYTES, check_packed
from proxy.store.sql.archived import note_archived
from proxy.store.sql.codec import JSON_COLUMNS, decode_json
from proxy.store.sql.images import insert_rows
from proxy.store.sql.locks import pass_alone
from proxy.store.sql.side_columns import drop_strays_of, each_row, insert_columns
from proxy.store.sql.tables import (
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
    withdrawn_keys,
)
from proxy.types import VALIDATE
from tokengrove.errors import ConfigurationError

_PAGE = 200
Progress = Callable[[dump.Totals], None]


class Conflict(StrEnum):
    """How an import treats a session that already exists: the import is refused, or the session is skipped."""

    REFUSE = "refuse"
    SKIP = "skip"


def export_all(database_url: str, output: str, progress: Progress) -> dump.Totals:
    """Write every session to the file `output` (`-`: standard output), one at a time. Returns the counts.

    Raises ConfigurationError for a database at another revision and for a file that cannot be written.
    """
    url = database.parse_url(database_url)
    state = schema.current(database_url)
    state.check(database.label(url))
    if state.newer:
        raise ConfigurationError(
            f"the database is at revision {state.revision}, of which this tokengrove ({migrations.head()}) would leave "
            "out what was added: export with the newer one"
        )
    engine = database.reader_engine(url, 1)
    try:
        with dump.writing(output) as file, engine.connect() as connection:
            return _export(connection, file, progress)
    except SQLAlchemyError as error:
        raise ConfigurationError(f"the database cannot be read: {getattr(error, 'orig', None) or error}") from None
    finally:
        engine.dispose()


def import_all(
    database_url: str, path: Path, on_conflict: Conflict, progress: Progress, max_record_bytes: int = MAX_RECORD_BYTES
) -> tuple[dump.Totals, int]:
    """Add every session of a dump. Returns the imported counts, and the number of skipped sessions.

    A session, and each of its images and side columns, is read as one record, of `max_record_bytes` at most. Reading
    one takes up to four times `max_record_bytes` of memory. Raises ConfigurationError, with nothing imported, for a
    damaged or newer dump, for a record that is too large, for a SQLite database that a server uses, and for an existing
    session unless `on_conflict` is SKIP. If the database fails during the import, or a column unpacks to too many
    bytes, the sessions that were already imported stay.
    """
    url = database.parse_url(database_url)
    lock = schema.lock_file(url) if database.is_sqlite(url) else None
    try:
        engine = database.writer_engine(url)
        try:
            schema.prepare(engine, migrate=True)
            source = _Source(path, max_record_bytes)
            present = _check(engine, source, on_conflict)
            return _import(engine, source, present, progress), len(present.sessions)
        except SQLAlchemyError as error:
            raise ConfigurationError(
                f"the database {database.label(url)} cannot be written: {reason_of(error)}; mend that, then complete "
                "the import with --on-conflict skip"
            ) from None
        finally:
            engine.dispose()
    finally:
        if lock is not None:
            lock.release()


def _export(connection: Connection, file: IO[bytes], progress: Progress) -> dump.Totals:
    totals = dump.Totals()

    def write(entry: Mapping[str, Any]) -> None:
        line = orjson.dumps(entry, option=orjson.OPT_APPEND_NEWLINE)
        file.write(line)
        totals.add(line, entry)

    header = {"tokengrove": "dump", "format": dump.FORMAT, "revision": migrations.head(), "created_at": time.time()}
    write(header)
    for row in connection.execute(select(capacity)).mappings():
        write({"capacity": dump.encode_row(capacity, row)})
    for row in connection.execute(select(archived_sessions).order_by(archived_sessions.c.number)).mappings():
        keys = _rows(connection, withdrawn_keys, row["session_id"])
        write({"archived": dump.encode_row(archived_sessions, row), "withdrawn_keys": keys})
    for entry in _sessions(connection):
        write(entry)
        del entry  # before the next one is read
        progress(totals)
    file.write(orjson.dumps({"end": totals.to_json()}, option=orjson.OPT_APPEND_NEWLINE))
    return totals


def _sessions(connection: Connection) -> Iterator[dict[str, Any]]:
    """Yield sessions with their rows in order of creation.

    Each image comes before the first session that has it, and each side column before its session.
    """
    after, written = -1, set[str]()
    query = select(sessions).order_by(sessions.c.number).limit(_PAGE)
    while page := connection.execute(query.where(sessions.c.number > after)).mappings().all():
        for row in page:
            yield from session_entries(connection, row, written)
        after = page[-1]["number"]


def session_entries(connection: Connection, row: RowMapping, written: set[str]) -> Iterator[dict[str, Any]]:
    """Yield the entries of a session, given its row: its images, its side columns, then the session.

    `written`: digests of images to leave out, to which those of this session are added.
    """
    parts = {name: _rows(connection, table, row["session_id"]) for name, table in dump.PARTS.items()}
    for digest in sorted(dump.digests_of(parts) - written):
        written.add(digest)
        image = connection.execute(select(images).where(images.c.digest == digest)).mappings().one()
        yield {"image": dump.encode_row(images, image)}
    yield from _columns(connection, row["session_id"], {each["id"] for each in parts["interactions"]})
    yield {"session": dump.encode_row(sessions, row), **parts}


def _columns(connection: Connection, session_id: str, turns: Collection[str]) -> Iterator[dict[str, Any]]:
    """Yield the side columns of a session, one at a time. Those without a turn, which `db check` names, are skipped."""
    for row in each_row(connection, session_id):
        entry = {"side_column": dump.encode_row(side_columns, row)} if row["interaction_id"] in turns else None
        del row
        if entry is not None:
            yield entry
        del entry


def _rows(connection: Connection, table: Table, session_id: str) -> list[dict[str, Any]]:
    if table is returns:
        of_session = select(interactions.c.id).where(interactions.c.session_id == session_id)
        query = select(table).where(table.c.interaction_id.in_(of_session))
    else:
        query = select(table).where(table.c.session_id == session_id)
    if table is session_images:  # skips images that a damaged database lacks: `db check` names them
        query = query.where(table.c.digest.in_(select(images.c.digest)))
    order = (interactions.c.seq,) if table is interactions else tuple(table.primary_key.columns)
    return [dump.encode_row(table, row) for row in connection.execute(query.order_by(*order)).mappings()]


@dataclass(frozen=True, slots=True)
class _Source:
    """A dump, and the most bytes that a record of it may have."""

    path: Path | str
    most: int

    @contextmanager
    def entries(self) -> Iterator[Iterator[dict[str, Any]]]:
        with dump.reading(Path(self.path)) as file:
            yield dump.entries(file, str(self.path), self.most)


@dataclass(frozen=True, slots=True)
class _Present:
    """Sessions of a dump that the database already has, and the images of the other sessions."""

    sessions: frozenset[str]
    needed: frozenset[str]


def _check(engine: Engine, source: _Source, on_conflict: Conflict) -> _Present:
    """Read the whole dump; return the entries that the import skips. Raises ConfigurationError."""
    names: dict[str, set[str]] = {}
    with source.entries() as entries:
        for entry in entries:
            if "tokengrove" in entry:
                _check_header(entry, source.path)
            elif "session" in entry:
                names[entry["session"]["session_id"]] = dump.digests_of(entry)
            del entry
    listed = list(names)
    with engine.connect() as connection:
        present: set[str] = set()
        for at in range(0, len(listed), _PAGE):
            query = select(sessions.c.session_id).where(sessions.c.session_id.in_(listed[at : at + _PAGE]))
            present.update(connection.execute(query).scalars())
    if present and on_conflict is Conflict.REFUSE:
        raise ConfigurationError(
            f"{len(present)} sessions of {source.path} are in the database already, such as {min(present)!r}; "
            "skip them with --on-conflict skip"
        )
    needed = frozenset[str]().union(*(digests for name, digests in names.items() if name not in present))
    return _Present(frozenset(present), needed)


def _check_header(header: Mapping[str, Any], path: Path | str) -> None:
    if header["format"] > dump.FORMAT:
        raise _newer(path)
    check_revision(header["revision"], path)


def check_revision(revision: str, name: Path | str) -> None:
    """Raise ConfigurationError if rows of a database at this revision may have columns that this release lacks."""
    if revision > migrations.head():
        raise _newer(name)


def _newer(name: Path | str) -> ConfigurationError:
    """The error for a file of a newer release."""
    return ConfigurationError(f"{name} was written by a newer tokengrove; upgrade this one")


def _import(engine: Engine, source: _Source, present: _Present, progress: Progress) -> dump.Totals:
    done = dump.Totals()
    with engine.connect() as connection:
        last = connection.execute(select(func.coalesce(func.max(sessions.c.ended_order), 0))).scalar_one()
    with source.entries() as entries:
        wanted = _wanted(entries, present)
        while _import_next(engine, wanted, source, last, done):
            progress(done)
    return done


def _wanted(entries: Iterator[dict[str, Any]], present: _Present) -> Iterator[dict[str, Any]]:
    """Yield the entries to import."""
    for entry in entries:
        if "image" in entry:
            wanted = entry["image"].get("digest") in present.needed
        elif "side_column" in entry:
            wanted = entry["side_column"].get("session_id") not in present.sessions
        else:
            wanted = "session" in entry and entry["session"]["session_id"] not in present.sessions
        if wanted or "capacity" in entry or "archived" in entry:
            yield entry
        del entry


def _import_next(
    engine: Engine, wanted: Iterator[dict[str, Any]], source: _Source, last_ended: int, done: dump.Totals
) -> bool:
    """Import a session and what comes before it, one record at a time, in one transaction. False at the end."""
    entry = next(wanted, None)
    if entry is None:
        return False
    with engine.begin() as connection:
        owners: set[str] = set()
        while (kind := _large(entry)) is not None:
            _import_large(connection, entry, owners, source.path)
            done.add(b"", entry)
            entry = None
            entry = next(wanted, None)
            if entry is None:
                raise ConfigurationError(f"{source.path} is damaged: its last {kind} is that of no session after it")
        if "session" in entry:
            _import_session(connection, entry, last_ended, source)
            _check_owners(owners, entry["session"]["session_id"], source.path)
        elif "archived" in entry:
            _import_archived(connection, entry, source.path)
        else:
            _import_capacity(connection, entry["capacity"])
    done.add(b"", entry)
    return True


def _large(entry: Mapping[str, Any]) -> str | None:
    """The kind of an entry that comes before its session; None for other entries."""
    return "image" if "image" in entry else "side column" if "side_column" in entry else None


def add_session(connection: Connection, entries: Sequence[Mapping[str, Any]], number: int | None, name: str) -> None:
    """Add a session to a database, given its entries; `number`: its own.

    It keeps its place in the order of ends, or if another session has that, it gets the last one. `name`: where the
    entries come from, for messages. Raises ConfigurationError.
    """
    *beside, entry = entries
    owners: set[str] = set()
    for each in beside:
        _import_large(connection, each, owners, name)
    row, last = dict(entry["session"]), 0
    pass_alone(connection, "ended order")
    of_end = sessions.c.ended_order == row.get("ended_order")
    if "ended_order" in row and connection.execute(select(exists().where(of_end))).scalar():
        last, row["ended_order"] = connection.execute(select(func.max(sessions.c.ended_order))).scalar_one(), 1
    _import_session(connection, {**entry, "session": row}, last, _Source(name, MAX_RECORD_BYTES), number)
    _check_owners(owners, row["session_id"], name)


def _import_large(connection: Connection, entry: Mapping[str, Any], owners: set[str], path: Path | str) -> None:
    """Add an image or a side column, which come before their session."""
    if "image" in entry:
        insert_rows(connection, [_image(entry["image"], path)])
    else:
        _import_column(connection, entry["side_column"], owners, path)


def _import_column(connection: Connection, row: Mapping[str, Any], owners: set[str], path: Path | str) -> None:
    """Add a side column of the session that follows, and the session's id to `owners`. Raises ConfigurationError."""
    try:
        values = dump.decode_column(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is damaged in side column {_name_of(row)}: {error}") from None
    owner: str = values["session_id"]
    if owner not in owners:
        drop_strays_of(connection, owner)
        owners.add(owner)
    try:
        insert_columns(connection, [values])
    except IntegrityError:
        raise ConfigurationError(f"side column {_name_of(row)} of session {owner!r} is in another session") from None


def _name_of(row: Mapping[str, Any]) -> str:
    return f"{row.get('name')!r} of interaction {row.get('interaction_id')!r}"


def _check_owners(owners: Collection[str], session_id: str, path: Path | str) -> None:
    """Raise ConfigurationError unless the side columns before a session are its own."""
    for other in set(owners) - {session_id}:
        raise ConfigurationError(f"{path} is damaged: a side column before session {session_id!r} is of {other!r}")


def _image(row: Mapping[str, Any], path: Path | str) -> dict[str, Any]:
    """The values of an image. Raises ConfigurationError."""
    try:
        return dump.decode_image(row)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is damaged in image {row.get('digest')!r}: {error}") from None


def _import_session(
    connection: Connection, entry: Mapping[str, Any], last_ended: int, source: _Source, number: int | None = None
) -> None:
    """Add one session; its end is ordered after the ends of all earlier sessions. Raises ConfigurationError."""
    name, part = entry["session"].get("session_id"), ""
    owner = f"session {name!r} of {source.path}"
    try:
        row = dump.decode_row(sessions, entry["session"])
        check_packed(_json_of(row), owner, source.most)
        if "validation" not in row:  # a dump of a database before revision 0006
            row["validation"] = decode_json(row["metadata"], {}).get(VALIDATE) is True
        del row["claimed_by"], row["claimed_until"]  # a lease ends with the server that granted it
        if row["ended_order"] is not None:
            row["ended_order"] += last_ended
        if number is not None:
            row["number"] = number
        connection.execute(insert(sessions).values(row))
        for part, rows in dump.session_parts(entry).items():
            for values in _decoded(dump.PARTS[part], rows):
                for each in values:
                    check_packed(_json_of(each), owner, source.most)
                connection.execute(insert(dump.PARTS[part]), values)
    except IntegrityError:
        what = f"an interaction of session {name!r} is in another session already"
        if part == "session_images":
            what = f"an image of session {name!r} was deleted meanwhile; import again with --on-conflict skip"
        raise ConfigurationError(what) from None
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{source.path} is damaged in session {name!r}: {error}") from None


def _decoded(table: Table, rows: Sequence[Mapping[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the values of the rows, some at a time."""
    # Neither the process that ran a call nor a server that granted a lease uses this database.
    unowned = {intents: {"owner": None}, session_routes: {"claimed_by": None, "claimed_until": None}}.get(table, {})
    for at in range(0, len(rows), _PAGE):
        yield [{**dump.decode_row(table, each), **unowned} for each in rows[at : at + _PAGE]]


def _json_of(row: Mapping[str, Any]) -> dict[str, bytes | None]:
    return {column: row[column] for column in JSON_COLUMNS if column in row}


def _import_archived(connection: Connection, entry: Mapping[str, Any], path: Path | str) -> None:
    """Note an archived session, unless the database has one of its id, archived or not. Raises ConfigurationError."""
    try:
        row = dump.decode_row(archived_sessions, entry["archived"])
        keys = [dump.decode_row(withdrawn_keys, each) for each in entry["withdrawn_keys"]]
        note_archived(connection, row, keys)
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigurationError(f"{path} is damaged in an archived session: {error}") from None


def _import_capacity(connection: Connection, row: Mapping[str, Any]) -> None:
    """Add a capacity row unless the database already has one with its name."""
    if not connection.execute(select(capacity).where(capacity.c.name == row["name"])).first():
        connection.execute(insert(capacity).values(dict(row)))
