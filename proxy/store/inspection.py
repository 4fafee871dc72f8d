"""Reads a whole database for audits, in one read-only snapshot, even while a server writes.

A row that cannot be decoded becomes a `Broken` value, so that it does not hide the others. Rows are read as the driver
returns them, because SQLAlchemy types may convert a damaged value to a valid one.
"""

from __future__ import annotations

import hashlib
import shlex
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from sqlalchemy import (
    ColumnElement,
    Connection,
    RowMapping,
    Select,
    Table,
    bindparam,
    exists,
    func,
    select,
    text,
    type_coerce,
)
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.types import NullType

from proxy.side_columns.columns import DECLARED, StoredColumn, loaded
from proxy.store import database, schema
from proxy.store.faults import reason_of
from proxy.store.recordings import SessionReads
from proxy.store.sql import checksums, codec, reads, rows
from proxy.store.sql.archived import find_archived
from proxy.store.sql.checksums import Missing
from proxy.store.sql.images import load_parts
from proxy.store.sql.side_columns import checksum_of, each_row
from proxy.store.sql.tables import (
    images,
    intents,
    interactions,
    session_images,
    session_routes,
    sessions,
    side_columns,
    unreplied,
)
from proxy.types import ImagePart, Interaction, SessionRecord
from tokengrove.errors import ConfigurationError, ProxyError
from tokengrove.options.session import Credit, SessionStatus
from tokengrove.reasons import Status

# All errors that decoding a broken value may raise, from any library that it uses.
_OF_VALUES = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
BROKEN = (*_OF_VALUES, ProxyError, struct.error, zlib.error)
_PAGE = 500
_FILLED_AT_ONCE = 500
# The decoder of each column, to find the column that cannot be decoded.
_DECODERS: Mapping[str, Callable[[Any], object]] = {
    **dict.fromkeys(codec.JSON_COLUMNS, codec.decode_json),
    **dict.fromkeys(("prompt_suffix", "output_ids"), codec.decode_ids),
    **dict.fromkeys(("logprobs", "unmasked_logprobs", "token_rewards"), codec.decode_floats),
}

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be decoded: its id and the reason."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class FoundColumn:
    """A stored side column, without its rows: these are the positions [start, end), of which `missing` are missing.

    `missing` None: the rows are not known, for the reason `fault`, or because a newer release wrote them.
    """

    interaction_id: str
    name: str
    start: int
    end: int
    missing: int | None
    fault: str | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """One session with all its rows.

    `interactions`: by seq. `returns`: by (interaction id, discount, credit rule). `begun`: ids of calls noted as begun.
    `existing`: ids in `begun` whose interaction is stored, which is a fault. `images`: digests of its stored images.
    `turns`: the number of each complete interaction. `unlike`: interactions (None: the session) whose values do not
    match their checksum or cannot be read, each with the reason. `missing`: the checksums that its rows lack.
    `columns`: its side columns.
    """

    session_id: str
    record: SessionRecord | Broken
    next_seq: int
    ended_order: int | None
    interactions: list[Interaction | Broken]
    returns: Mapping[tuple[str, float, Credit], float]
    begun: frozenset[str]
    existing: frozenset[str]
    images: frozenset[str] = frozenset()
    turns: Mapping[str, int] = field(default_factory=dict)
    unlike: Sequence[tuple[str | None, str]] = ()
    missing: Mapping[Missing, Sequence[tuple[str, bytes]]] = field(default_factory=dict)
    columns: Sequence[FoundColumn] = ()


class Inspection:
    """Reads through one connection. Use `inspecting` to open one.

    `recordings` reads like a server, in the caller's thread; a damaged row then raises an error.
    """

    def __init__(self, connection: Connection, *, newer: bool = False) -> None:
        """`newer`: the database has columns that this release does not know, so no checksum can be computed."""
        self._connection, self._newer = connection, newer
        self.recordings = SessionReads(self)

    async def read(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` on the connection. Blocks."""
        return self.read_now(read, *args, **kwargs)

    def read_now(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Like `read`, without a coroutine."""
        return read(self._connection, *args, **kwargs)

    def faults(self) -> list[str]:
        """Faults of the database as a whole: pages (SQLite), references between tables, the order of ends, images."""
        return [*self._sqlite_faults(), *self._strangers(), *self._shared_orders(), *self._changed_images()]

    def sessions(self, session_id: str | None = None) -> Iterator[Stored]:
        """Yield all sessions in order of creation, or the given one. Raises ConfigurationError if it does not exist."""
        after = -1
        while page := self._page(after, session_id):
            for row in page:
                yield self._stored(row)
            after = page[-1]["number"]
            if session_id is not None:
                return
        if session_id is not None:
            for moved in find_archived(self._connection, [session_id]).values():
                raise ConfigurationError(
                    f"session {session_id!r} is archived in {moved.file}; bring it back with: "
                    f"tokengrove archive restore {shlex.quote(session_id)}"
                )
            raise ConfigurationError(f"there is no session {session_id!r} in this database")

    def _page(self, after: int, session_id: str | None) -> list[RowMapping]:
        query = _select(sessions).where(sessions.c.number > after).order_by(sessions.c.number).limit(_PAGE)
        if session_id is not None:
            query = query.where(sessions.c.session_id == session_id)
        return list(self._connection.execute(query).mappings())

    def _stored(self, row: RowMapping) -> Stored:
        name, unlike = row["session_id"], list[tuple[str | None, str]]()

        def read(what: str, load: Callable[[Connection, str], T], instead: T) -> T:
            try:
                return load(self._connection, name)
            except BROKEN as error:
                unlike.append((None, f"its {what} cannot be read: {type(error).__name__}: {error}"))
                return instead

        turns = read("turns", _load_turns, list[RowMapping]())
        begun = read("begun calls", reads.load_begun, dict[str, float]()).keys()
        shown = read("images", load_parts, list[tuple[ImagePart, int, str | None]]())
        return Stored(
            session_id=name,
            record=_decode(row, name, rows.session_of),
            next_seq=row["next_seq"],
            ended_order=row["ended_order"],
            interactions=[_decode(each, each["id"], rows.interaction_of) for each in turns],
            returns=read("returns", reads.load_returns, {}),
            begun=frozenset(begun),
            existing=frozenset(begun & {each["id"] for each in turns}),
            images=frozenset(part.digest for part, _, _ in shown),
            turns={each["id"]: turn for turn, each in enumerate(filter(_is_complete, turns))},
            missing={} if self._newer else _compare(row, turns, unlike),
            unlike=unlike,
            columns=read("side columns", _find_columns, list[FoundColumn]()),
        )

    def _sqlite_faults(self) -> list[str]:
        if self._connection.dialect.name != "sqlite":
            return []
        found = [str(line) for line in self._connection.execute(text("PRAGMA integrity_check")).scalars()]
        return [f"SQLite: {line}" for line in found if line != "ok"]

    def _strangers(self) -> list[str]:
        known = select(sessions.c.session_id)
        query = select(interactions.c.id).where(interactions.c.session_id.not_in(known)).limit(100)
        calls = select(intents.c.interaction_id).where(intents.c.session_id.not_in(known)).limit(100)
        turns = select(interactions.c.id).where(interactions.c.id == unreplied.c.interaction_id)
        linked = exists().where(session_images.c.digest == images.c.digest, session_images.c.session_id.in_(known))
        loose = select(images.c.digest).where(~linked).limit(100)
        stray = side_columns.c.session_id.not_in(known)
        aside = select(side_columns.c.name, side_columns.c.interaction_id).where(stray).limit(100)
        routes = (
            select(session_routes.c.session_id).where(session_routes.c.session_id.not_in(known)).distinct().limit(100)
        )
        late = select(unreplied.c.interaction_id).where(~turns.exists()).limit(100)
        return [
            *(f"interaction {name} belongs to no session" for name in self._connection.execute(query).scalars()),
            *(f"the begun call {name} belongs to no session" for name in self._connection.execute(calls).scalars()),
            *(f"image {name} belongs to no session: prune" for name in self._connection.execute(loose).scalars()),
            *(
                f"column {name} of interaction {of} belongs to no session: prune"
                for name, of in self._connection.execute(aside)
            ),
            *(
                f"the routes of session {name} belong to no session: prune"
                for name in self._connection.execute(routes).scalars()
            ),
            *(f"the unreplied turn {name} does not exist" for name in self._connection.execute(late).scalars()),
        ]

    def _shared_orders(self) -> list[str]:
        query = (
            select(sessions.c.ended_order, func.count())
            .where(sessions.c.ended_order.is_not(None))
            .group_by(sessions.c.ended_order)
            .having(func.count() > 1)
        )
        return [f"{count} sessions share ended_order {order}" for order, count in self._connection.execute(query)]

    def _changed_images(self) -> Iterator[str]:
        """Images whose bytes do not match their digest. One image at a time is in memory."""
        query = select(images.c.digest, images.c.size, images.c.data).order_by(images.c.digest).limit(1)
        after = ""
        while (row := self._connection.execute(query.where(images.c.digest > after)).first()) is not None:
            after, size, data = row
            if hashlib.sha256(data).hexdigest() != after or size != len(data):
                yield f"image {after} has other bytes than its digest and its size say"


@contextmanager
def inspecting(database_url: str) -> Iterator[Inspection]:
    """Open a database for inspection. Raises ConfigurationError if it is missing, unreadable or at another revision."""
    url = database.parse_url(database_url)
    name = database.label(url)
    if database.is_sqlite(url) and not Path(name).exists():
        raise ConfigurationError(
            f"there is no database {name}: run this in the folder of the server, or give --database-url"
        )
    state = schema.current(database_url)
    state.check(name)
    engine = database.reader_engine(url, 1)
    try:
        with engine.connect() as connection:
            if database.is_sqlite(url):  # invalid UTF-8 is a finding and must not end the check
                connection.connection.driver_connection.text_factory = _lenient  # type: ignore[union-attr]
            yield Inspection(connection, newer=state.newer)
    except SQLAlchemyError as error:
        raise ConfigurationError(f"the database cannot be read: {getattr(error, 'orig', None) or error}") from None
    finally:
        engine.dispose()


@contextmanager
def filling(database_url: str) -> Iterator[Callable[[Stored], int]]:
    """Yield a function that stores the checksums that the rows of a session lack, and returns their number.

    Raises ConfigurationError for a SQLite file that a server uses, and if the database refuses.
    """
    url = database.parse_url(database_url)
    lock = schema.lock_file(url) if database.is_sqlite(url) else None
    engine = database.writer_engine(url)
    waiting: dict[Missing, list[tuple[str, bytes]]] = {kind: [] for kind in Missing}

    def write() -> None:
        with engine.begin() as connection:
            checksums.fill(connection, waiting)
        for digests in waiting.values():
            digests.clear()

    def add(stored: Stored) -> int:
        for kind, digests in stored.missing.items():
            waiting[kind] += digests
        if sum(map(len, waiting.values())) >= _FILLED_AT_ONCE:
            write()
        return sum(map(len, stored.missing.values()))

    try:
        yield add
        write()
    except SQLAlchemyError as error:
        raise ConfigurationError(f"the checksums cannot be stored: {reason_of(error)}") from None
    finally:
        engine.dispose()
        if lock is not None:
            lock.release()


def _select(table: Table) -> Select[Any]:
    """All columns, with the values as the driver returns them."""
    columns: Sequence[ColumnElement[Any]] = [type_coerce(each, NullType()).label(each.name) for each in table.c]
    return select(*columns)


# Made once: making a query of all columns takes as long as running it.
_TURNS = _select(interactions).where(interactions.c.session_id == bindparam("of_session")).order_by(interactions.c.seq)


def _load_turns(connection: Connection, session_id: str) -> list[RowMapping]:
    return list(connection.execute(_TURNS, {"of_session": session_id}).mappings())


def _find_columns(connection: Connection, session_id: str) -> list[FoundColumn]:
    return [_found(row) for row in each_row(connection, session_id)]


def _found(row: RowMapping) -> FoundColumn:
    """Decode a side column, and forget its rows."""
    missing, fault = None, None
    try:
        if checksum_of({str(name): value for name, value in row.items()}) != row["checksum"]:
            fault = "has other values than were written: its checksum differs"
        elif row["name"] in DECLARED:
            missing = int(loaded(StoredColumn(*(row[name] for name in StoredColumn._fields))).rows.missing.sum())
    except BROKEN as error:
        fault = f"cannot be decoded: {type(error).__name__}: {error}"
    start, number = (row[name] if isinstance(row[name], int) else 0 for name in ("start", "number"))
    return FoundColumn(row["interaction_id"], row["name"], start, start + number, missing, fault)


def _is_complete(row: RowMapping) -> bool:
    return bool(row["status"] == Status.COMPLETE.value)


def _lenient(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")


def _compare(
    session: RowMapping, turns: Sequence[RowMapping], unlike: list[tuple[str | None, str]]
) -> dict[Missing, list[tuple[str, bytes]]]:
    """Add to `unlike` the rows whose values do not match their checksum; return the missing checksums."""
    missing: dict[Missing, list[tuple[str, bytes]]] = {kind: [] for kind in Missing}
    checked = [(Missing.START, session, "checksum", checksums.of_start, None)]
    if session["status"] != SessionStatus.ACTIVE.value or session["end_checksum"] is not None:
        checked.append((Missing.END, session, "end_checksum", checksums.of_end, None))
    checked += [(Missing.TURN, each, "checksum", checksums.of_turn, each["id"]) for each in turns]
    for kind, row, column, compute, name in checked:
        try:
            digest = compute(row)
        except BROKEN as error:
            unlike.append((name, f"a value is not of the type of its column: {type(error).__name__}: {error}"))
            continue
        if row[column] is None:
            missing[kind].append((row["session_id"] if name is None else name, digest))
        elif row[column] != digest:
            of = {Missing.TURN: "it", Missing.START: "its start", Missing.END: "its end"}[kind]
            unlike.append((name, f"{of} has other values than were written: its checksum differs"))
    return missing


def _decode(row: RowMapping, name: str, decode: Callable[[RowMapping], T]) -> T | Broken:
    try:
        return decode(row)
    except BROKEN as error:
        return Broken(name, f"{_damaged_column(row)}{type(error).__name__}: {error}")


def _damaged_column(row: RowMapping) -> str:
    """The column that cannot be decoded; empty if all can."""
    for name, decode in _DECODERS.items():
        try:
            if row.get(name) is not None:
                decode(row[name])
        except BROKEN:
            return f"column {name}: "
    return ""
