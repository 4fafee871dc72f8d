"""Queries for the changes of a session since a replica last read it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from sqlalchemy import ColumnElement, Connection, Text, literal_column, null, select, union_all
from sqlalchemy.exc import SQLAlchemyError

from proxy.store.news import InArchive, MutableFields, News, Seen
from proxy.store.sql import archived, codec, reads, rows
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import archived_sessions, interactions, sessions
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Status

Wanted = tuple[str, Seen]
"""A session, and the state in which it was seen."""
_NOTHING: ColumnElement[int] = literal_column("0")
# One query for both tables: a session that is in neither may be new, and an archived one is refused.
_STATES = Statement(
    union_all(
        select(sessions.c.session_id, sessions.c.next_seq, sessions.c.revision, null().cast(Text)).where(
            Named(sessions.c.session_id)
        ),
        select(archived_sessions.c.session_id, _NOTHING, _NOTHING, archived_sessions.c.file).where(
            Named(archived_sessions.c.session_id)
        ),
    )
)


def load_new_turns(connection: Connection, wanted: Sequence[Wanted]) -> list[News | InArchive | Exception | None]:
    """The news of sessions. Runs one query, and one more for each session that has new turns.

    None for a session that does not exist, an exception for one with damaged rows. If the revision of a session also
    grew, its news has only the state.
    Needs no transaction: a turn is read after the state, so it may have a newer reward but not an older one.
    """
    names = {name for name, _ in wanted}
    states = {
        name: Seen(next_seq, revision) if file is None else InArchive(file)
        for name, next_seq, revision, file in _STATES.fetch(connection, {"names": json_list(names)})
    }
    return [_new_turns(connection, name, seen, states.get(name)) for name, seen in wanted]


def _new_turns(
    connection: Connection, session_id: str, seen: Seen, now: Seen | InArchive | None
) -> News | InArchive | Exception | None:
    if not isinstance(now, Seen):
        return now
    if now == seen or now.revision != seen.revision:
        return News(now, None, [], set(), ())
    try:
        return News(now, None, *reads.load_turns(connection, session_id, seen.next_seq, now.next_seq), ())
    except SQLAlchemyError:
        raise
    except Exception as error:
        return error


def load_news(connection: Connection, session_id: str, seen: Seen) -> News | InArchive | None:
    """The changes since `seen`, or where the session is archived; None if there is none. Reads one snapshot."""
    query = select(sessions.c.next_seq, sessions.c.revision).where(sessions.c.session_id == session_id)
    found = connection.execute(query).first()
    if found is None:
        moved = archived.find_archived(connection, [session_id]).get(session_id)
        return None if moved is None else InArchive(moved.file)
    now = Seen(*found)
    new, unreplied = reads.load_turns(connection, session_id, seen.next_seq, now.next_seq)
    if now.revision == seen.revision:
        return News(now, None, new, unreplied, ())
    return News(now, reads.load_session(connection, session_id), new, unreplied, _changed(connection, session_id, seen))


def live_sessions(connection: Connection, session_ids: Collection[str]) -> set[str]:
    """The sessions that have not ended, of at most MAX_SESSION_IDS `session_ids`."""
    query = select(sessions.c.session_id).where(
        sessions.c.session_id.in_(session_ids), sessions.c.status == SessionStatus.ACTIVE.value
    )
    return set(connection.execute(query).scalars())


def _changed(connection: Connection, session_id: str, seen: Seen) -> list[MutableFields]:
    columns = interactions.c
    query = select(
        *(columns.id, columns.status, columns.reward, columns.rewards, columns.token_rewards),
        *(columns.trainable, columns.spans),
    ).where(columns.session_id == session_id, columns.seq < seen.next_seq)
    return [
        MutableFields(
            row["id"],
            Status(row["status"]),
            row["reward"],
            codec.decode_json(row["rewards"], {}),
            None if row["token_rewards"] is None else codec.decode_floats(row["token_rewards"]),
            row["trainable"],
            rows.pairs_of(row["spans"]),
        )
        for row in connection.execute(query).mappings()
    ]
