"""The full-text index of turns: FTS5 on SQLite, tsvector on PostgreSQL.

A turn is indexed once: with the messages that it adds to its parent, and its answer. The index has no texts, because
those of the interactions never change. SQLite needs the text of a turn to remove its words, so after a change of
`text_of` or of the tokenizer, a migration must empty the index. `indexed_sessions` tells what is in the index, in the
same transaction: after a crash, indexing continues where it stopped.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    and_,
    bindparam,
    delete,
    func,
    literal,
    or_,
    select,
    text,
)
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.compiler import SQLCompiler

from proxy.store.sql.codec import decode_json
from proxy.store.sql.tables import indexed_sessions, interactions, sessions
from proxy.store.text_query import WORDS, Match, TextQuery, snippet_of
from tokengrove.errors import InvalidRequest
from tokengrove.options.session import SessionStatus

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

# A tsvector has at most 1 MB. A text of so many characters has no larger one.
_PART = 100_000
_SEQ_BITS = 32
_SEARCH_S = 5.0
_STEPS = 20_000  # of SQLite's virtual machine, between two looks at the clock: some milliseconds
_ENDED_LATELY_S = 600.0
_PLACE = zlib.crc32(b"text index")
_DAMAGED = (LookupError, TypeError, ValueError, zlib.error)
_marks = indexed_sessions.c
_done: ColumnElement[int] = func.coalesce(_marks.turns, literal(0))

_INSERT_SQLITE = text("INSERT INTO turn_words (rowid, text) VALUES (:row, :text)")
_DELETE_SQLITE = text("INSERT INTO turn_words (turn_words, rowid, text) VALUES ('delete', :row, :text)")
_EMPTY_SQLITE = text("INSERT INTO turn_words (turn_words) VALUES ('delete-all')")
_OPTIMIZE_SQLITE = text("INSERT INTO turn_words (turn_words) VALUES ('optimize')")
_FIND_SQLITE = text(
    "SELECT rowid FROM turn_words WHERE turn_words MATCH :query AND rowid BETWEEN :first AND :last ORDER BY rowid "
    "LIMIT :most"
)
_INSERT_POSTGRES = text(
    "INSERT INTO turn_words (session_id, seq, part, words) VALUES (:name, :seq, :part, to_tsvector('simple', :text))"
)
_DELETE_POSTGRES = text("DELETE FROM turn_words WHERE session_id = ANY(:names)")
_FIND_POSTGRES = text(
    "SELECT asked.name, found.seq FROM unnest(CAST(:names AS TEXT[])) AS asked (name), LATERAL ("
    "SELECT DISTINCT seq FROM turn_words WHERE session_id = asked.name AND words @@ to_tsquery('simple', :query) "
    "ORDER BY seq LIMIT :most) AS found"
)
_MARK = text(
    "INSERT INTO indexed_sessions (session_id, number, turns) VALUES (:name, :number, :turns) "
    "ON CONFLICT (session_id) DO UPDATE SET turns = excluded.turns, number = excluded.number"
)


class Unindexed(NamedTuple):
    """Turns of a session that are not in the index: from seq `begin` on, before `end`. `texts`: by seq.

    `whole`: these are all. `number`: that of the session.
    """

    session_id: str
    number: int
    begin: int
    end: int
    whole: bool
    texts: Sequence[tuple[int, str]]


class Found(NamedTuple):
    """Turns to index. `more`: there may be more of these sessions. `seconds`: the CPU time of reading them."""

    sessions: Sequence[Unindexed]
    more: bool
    seconds: float


class HasText(ColumnElement[bool]):
    """True if a session has a turn with the wanted text. `session_id`: the column with its id."""

    inherit_cache = False

    def __init__(self, session_id: ColumnElement[str], wanted: TextQuery) -> None:
        self.session_id = session_id
        self.for_sqlite: BindParameter[str] = bindparam(None, wanted.for_sqlite, unique=True)
        self.for_postgres: BindParameter[str] = bindparam(None, wanted.for_postgres, unique=True)


@compiles(HasText, "sqlite")
def _has_text_sqlite(element: HasText, compiler: SQLCompiler, **options: Any) -> str:
    name, query = (compiler.process(each, **options) for each in (element.session_id, element.for_sqlite))
    numbers = f"SELECT rowid >> {_SEQ_BITS} FROM turn_words WHERE turn_words MATCH {query}"
    return f"{name} IN (SELECT session_id FROM indexed_sessions WHERE number IN ({numbers}))"


@compiles(HasText, "postgresql")
def _has_text_postgres(element: HasText, compiler: SQLCompiler, **options: Any) -> str:
    name, query = (compiler.process(each, **options) for each in (element.session_id, element.for_postgres))
    return f"{name} IN (SELECT session_id FROM turn_words WHERE words @@ to_tsquery('simple', {query}))"


def text_of(new_messages: bytes | None, output: bytes | None) -> str:
    """What is indexed of a turn: contents, reasoning, names and arguments of tool calls, a line for each."""
    lines: list[str] = []
    for message in (*decode_json(new_messages, ()), *((decode_json(output),) if output is not None else ())):
        lines += (message["content"], message.get("reasoning") or "")
        for _, name, arguments in message.get("tool_calls", ()):
            lines += (name, arguments)
    joined = "\n".join(filter(None, lines))
    return joined if joined.isascii() else joined.encode("utf-8", "replace").decode("utf-8")


def among(names: Collection[str]) -> ColumnElement[bool]:
    """The condition for a session to be one of these, at most 10,000."""
    return sessions.c.session_id.in_(names)


def beyond(number: int) -> ColumnElement[bool]:
    """The condition for a session to be newer than that of this number."""
    return sessions.c.number > number


def in_use() -> ColumnElement[bool]:
    """The condition for a session to be live or to have ended lately: only these get turns."""
    columns = sessions.c
    ended = columns.ended_at > time.time() - _ENDED_LATELY_S
    return or_(columns.status == SessionStatus.ACTIVE.value, ended)


def unindexed(connection: Connection, which: ColumnElement[bool], most_turns: int, most_characters: int) -> Found:
    """The first turns that are not in the index, by session. `most_characters`: a last turn may exceed it."""
    begun = time.thread_time()
    query = select(sessions.c.session_id, sessions.c.number, sessions.c.next_seq, _done)
    query = query.outerjoin_from(sessions, indexed_sessions, _marks.session_id == sessions.c.session_id)
    query = query.where(sessions.c.next_seq > _done, which).order_by(sessions.c.number).limit(most_turns)
    found: list[Unindexed] = []
    turns, characters = most_turns, most_characters
    rows = connection.execute(query).all()
    for name, number, next_seq, begin in rows:
        if turns <= 0 or characters <= 0:
            break
        texts: list[tuple[int, str]] = []
        for seq, said in _turns(connection, name, begin, min(next_seq, begin + turns)):
            if said is None:
                logger.warning("a damaged turn is not indexed", {"sessions": [name], "seq": seq})
                continue
            texts.append((seq, said))
            characters -= len(said)
            if characters <= 0:
                break
        end = texts[-1][0] + 1 if characters <= 0 and texts else min(next_seq, begin + turns)
        turns -= end - begin
        found.append(Unindexed(name, number, begin, end, end == next_seq, texts))
    more = len(rows) == most_turns or len(found) < len(rows) or (len(found) > 0 and not found[-1].whole)
    return Found(found, more, time.thread_time() - begun)


def _turns(connection: Connection, session_id: str, begin: int, end: int) -> Iterator[tuple[int, str | None]]:
    """The texts of the turns with `begin` <= seq < `end` that have one, by seq. None: it is damaged."""
    columns = interactions.c
    query = select(columns.seq, columns.new_messages, columns.output).where(columns.session_id == session_id)
    query = query.where(columns.seq >= begin, columns.seq < end).order_by(columns.seq)
    for seq, new_messages, output in connection.execute(query):
        try:
            said: str | None = text_of(new_messages, output)
        except _DAMAGED:
            said = None
        if said != "":
            yield seq, said


def index(connection: Connection, found: Sequence[Unindexed]) -> float | None:
    """Add turns to the index, but not of sessions that were deleted or indexed since. Return the seconds of work.

    None: another process indexes this database; nothing is added.
    """
    sqlite = connection.dialect.name == "sqlite"
    clock = time.thread_time if sqlite else time.perf_counter
    begun = clock()
    if not sqlite and not connection.execute(select(func.pg_try_advisory_xact_lock(_PLACE))).scalar():
        return None
    states = _states(connection, [each.session_id for each in found])
    still = [each for each in found if states.get(each.session_id) == (each.number, each.begin)]
    if sqlite:
        rows = [{"row": _row(each.number, seq), "text": said} for each in still for seq, said in each.texts]
        _run(connection, _INSERT_SQLITE, rows)
    else:
        _run(connection, _INSERT_POSTGRES, [row for each in still for row in _postgres_rows(each)])
    _run(connection, _MARK, [{"name": each.session_id, "number": each.number, "turns": each.end} for each in still])
    return clock() - begun


def _states(connection: Connection, names: Collection[str]) -> dict[str, tuple[int, int]]:
    """The numbers of existing sessions, and how many turns of each are indexed. None is deleted until the commit."""
    columns = sessions.c
    query = select(columns.session_id, columns.number).where(columns.session_id.in_(names))
    rows = connection.execute(query.order_by(columns.session_id).with_for_update(read=True, key_share=True)).all()
    marks = select(_marks.session_id, _marks.turns).where(_marks.session_id.in_(names))
    done = {name: turns for name, turns in connection.execute(marks)}
    return {name: (number, done.get(name, 0)) for name, number in rows}


def _row(number: int, seq: int) -> int:
    return number << _SEQ_BITS | seq


def _postgres_rows(found: Unindexed) -> Iterator[dict[str, Any]]:
    for seq, said in found.texts:
        rest, part = " ".join(WORDS.findall(said.lower())), 0
        while rest:
            cut = len(rest) if len(rest) <= _PART else max(rest.rfind(" ", 0, _PART), 0) or _PART
            yield {"name": found.session_id, "seq": seq, "part": part, "text": rest[:cut]}
            rest, part = rest[cut:].lstrip(), part + 1


def _run(connection: Connection, statement: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    if rows:
        connection.execute(statement, rows)


def drop_texts(connection: Connection, names: Collection[str]) -> None:
    """Remove the words of sessions from the index, before their turns are deleted."""
    query = select(_marks.session_id, _marks.number, _marks.turns).where(_marks.session_id.in_(names))
    marks = connection.execute(query).all()
    if not marks:
        return
    if connection.dialect.name == "sqlite":
        for name, number, turns in marks:
            rows = [{"row": _row(number, seq), "text": said} for seq, said in _turns(connection, name, 0, turns)]
            if any(row["text"] is None for row in rows):  # nobody knows its words
                return empty(connection)
            _run(connection, _DELETE_SQLITE, rows)
    else:
        connection.execute(_DELETE_POSTGRES, {"names": [name for name, _, _ in marks]})
    connection.execute(delete(indexed_sessions).where(_marks.session_id.in_([name for name, _, _ in marks])))


def empty(connection: Connection) -> None:
    """Remove everything from the index. A server that indexes begins anew."""
    connection.execute(_EMPTY_SQLITE if connection.dialect.name == "sqlite" else text("DELETE FROM turn_words"))
    connection.execute(delete(indexed_sessions))


def purge(connection: Connection) -> None:
    """Write the index of SQLite anew, without the words of deleted sessions, which it otherwise drops later."""
    if connection.dialect.name == "sqlite":
        connection.execute(_OPTIMIZE_SQLITE)


def is_used(connection: Connection) -> bool:
    """Whether a server has indexed sessions of this database."""
    return connection.execute(select(_marks.session_id).limit(1)).first() is not None


def newest(connection: Connection) -> int:
    """The number of the newest session; -1 without any."""
    number: int = connection.execute(select(func.coalesce(func.max(sessions.c.number), -1))).scalar_one()
    return number


def strays(connection: Connection, most: int) -> list[str]:
    """Sessions in the index that servers deleted which do not know it, at most `most`."""
    same = and_(_marks.session_id == sessions.c.session_id, _marks.number == sessions.c.number)
    query = select(_marks.session_id).outerjoin_from(indexed_sessions, sessions, same)
    return list(connection.execute(query.where(sessions.c.session_id.is_(None)).limit(most)).scalars())


def drop_strays(connection: Connection, names: Collection[str]) -> None:
    """Remove sessions from the index whose turns are gone. SQLite, which would need their texts, begins anew."""
    if connection.dialect.name == "sqlite":
        return empty(connection)
    connection.execute(_DELETE_POSTGRES, {"names": list(names)})
    connection.execute(delete(indexed_sessions).where(_marks.session_id.in_(names)))


def count_unindexed(connection: Connection, scanned: int | None) -> int:
    """The number of sessions with turns that are not in the index.

    `scanned`: older sessions, up to this number, were found indexed, unless they are in use; None: all were.
    """
    which = in_use() if scanned is None else or_(in_use(), beyond(scanned))
    query = select(func.count()).outerjoin_from(sessions, indexed_sessions, _marks.session_id == sessions.c.session_id)
    count: int = connection.execute(query.where(sessions.c.next_seq > _done, which)).scalar_one()
    return count


def find_matches(
    connection: Connection, names: Collection[str], wanted: TextQuery, most: int
) -> dict[str, list[Match]]:
    """The first turns, at most `most`, of each of these sessions that have the wanted text."""
    columns = interactions.c
    turn = select(columns.id, columns.new_messages, columns.output)
    found: dict[str, list[Match]] = {}
    for name, seq in _places(connection, names, wanted, most):
        row = connection.execute(turn.where(columns.session_id == name, columns.seq == seq)).one()
        snippet = snippet_of(text_of(row.new_messages, row.output), wanted)
        found.setdefault(name, []).append(Match(row.id, seq, snippet))
    return found


def _places(connection: Connection, names: Collection[str], wanted: TextQuery, most: int) -> Iterator[tuple[str, int]]:
    if connection.dialect.name != "sqlite":
        given = {"names": list(names), "query": wanted.for_postgres, "most": most}
        yield from ((name, seq) for name, seq in connection.execute(_FIND_POSTGRES, given).all())
        return
    numbers = select(_marks.session_id, _marks.number).where(_marks.session_id.in_(names))
    for name, number in connection.execute(numbers).all():
        first, last = _row(number, 0), _row(number + 1, 0) - 1
        given = {"query": wanted.for_sqlite, "first": first, "last": last, "most": most}
        for row in connection.execute(_FIND_SQLITE, given).scalars().all():
            yield name, row - first


def bounded(
    connection: Connection,
    read: Callable[Concatenate[Connection, P], T],
    /,
    *args: P.args,
    **kwargs: P.kwargs,
) -> T:
    """What `read` returns of a search for text. Raises InvalidRequest if it takes longer than five seconds."""
    with _clock(connection):
        try:
            return read(connection, *args, **kwargs)
        except OperationalError as error:
            if "interrupted" in str(error.orig) or getattr(error.orig, "sqlstate", None) == "57014":
                raise InvalidRequest(
                    f"'filter.text' was not found within {_SEARCH_S:g} s: give rarer words, or other filters",
                    param="filter.text",
                ) from None
            raise


@contextmanager
def _clock(connection: Connection) -> Iterator[None]:
    """Let the database end statements of the block when the time is over."""
    if connection.dialect.name != "sqlite":
        connection.execute(text(f"SET LOCAL statement_timeout = {int(_SEARCH_S * 1000)}"))
        yield
        return
    driver: Any = connection.connection.dbapi_connection
    until = time.monotonic() + _SEARCH_S
    driver.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        yield
    finally:
        driver.set_progress_handler(None, 0)
