"""Reads a whole database for audits, in one read-only snapshot, even while a server writes.

A row that cannot be decoded becomes a `Broken` value, so that it does not hide the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Concatenate, ParamSpec, TypeVar

from sqlalchemy import Connection, RowMapping, exists, func, select, text
from sqlalchemy.exc import SQLAlchemyError

from proxy.errors import ConfigurationError, ProxyError
from proxy.store import database, schema
from proxy.store.recordings import SessionReads
from proxy.store.sql import reads, rows
from proxy.store.sql.images import load_parts
from proxy.store.sql.tables import images, intents, interactions, session_images, sessions, unreplied
from proxy.types import Credit, Interaction, SessionRecord

# Everything that decoding a broken value raises, from any of the libraries below.
_BROKEN = (ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError, ProxyError)
_PAGE = 500

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Broken:
    """A row that cannot be decoded: its id and the reason."""

    id: str
    why: str


@dataclass(frozen=True, slots=True)
class Stored:
    """One session with all its rows.

    `interactions`: by seq. `returns`: by (interaction id, discount, credit rule). `begun`: ids of calls noted as begun.
    `existing`: those of `begun` whose interaction is stored, which must not be. `images`: digests of its stored ones.
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


class Inspection:
    """Reads through one connection. Use `inspecting` to open one.

    `recordings` reads as a server does, in the caller's thread; there a row that is damaged raises an error.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.recordings = SessionReads(self)

    async def read(self, read: Callable[Concatenate[Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function of `sql` on the connection. Blocks."""
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
            raise ConfigurationError(f"there is no session {session_id!r} in this database")

    def _page(self, after: int, session_id: str | None) -> list[RowMapping]:
        query = select(sessions).where(sessions.c.number > after).order_by(sessions.c.number).limit(_PAGE)
        if session_id is not None:
            query = query.where(sessions.c.session_id == session_id)
        return list(self._connection.execute(query).mappings())

    def _stored(self, row: RowMapping) -> Stored:
        name = row["session_id"]
        query = select(interactions).where(interactions.c.session_id == name).order_by(interactions.c.seq)
        nodes = [_decode(each, each["id"], rows.interaction_of) for each in self._connection.execute(query).mappings()]
        begun = reads.load_begun(self._connection, name).keys()
        return Stored(
            session_id=name,
            record=_decode(row, name, rows.session_of),
            next_seq=row["next_seq"],
            ended_order=row["ended_order"],
            interactions=nodes,
            returns=reads.load_returns(self._connection, name),
            begun=frozenset(begun),
            existing=frozenset(begun & {node.id for node in nodes}),
            images=frozenset(part.digest for part, _, _ in load_parts(self._connection, name)),
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
        late = select(unreplied.c.interaction_id).where(~turns.exists()).limit(100)
        return [
            *(f"interaction {name} belongs to no session" for name in self._connection.execute(query).scalars()),
            *(f"the begun call {name} belongs to no session" for name in self._connection.execute(calls).scalars()),
            *(f"image {name} belongs to no session: prune" for name in self._connection.execute(loose).scalars()),
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
        """Images whose bytes are not those that their digests name; one at a time is in memory."""
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
    schema.current(database_url).check(database.label(url))
    engine = database.reader_engine(url, 1)
    try:
        with engine.connect() as connection:
            yield Inspection(connection)
    except SQLAlchemyError as error:
        raise ConfigurationError(f"the database cannot be read: {getattr(error, 'orig', None) or error}") from None
    finally:
        engine.dispose()


def _decode(row: RowMapping, name: str, decode: Callable[[RowMapping], T]) -> T | Broken:
    try:
        return decode(row)
    except _BROKEN as error:
        return Broken(name, f"{type(error).__name__}: {error}")
