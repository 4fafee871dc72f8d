"""Queries. Each runs in a reader thread, in one transaction that reads one snapshot."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

from sqlalchemy import (
    Boolean,
    ColumnElement,
    Connection,
    FromClause,
    Select,
    and_,
    bindparam,
    case,
    cast,
    exists,
    func,
    literal,
    not_,
    null,
    or_,
    select,
)

from proxy.store.session_query import MAX_SESSION_IDS, SessionQuery, Wanted
from proxy.store.sql import rows
from proxy.store.sql.begun import LIVES, PENDING
from proxy.store.sql.codec import decode_json
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.tables import (
    annotated,
    archived_sessions,
    intents,
    interactions,
    returns,
    sessions,
    unreplied,
    withdrawn_keys,
)
from proxy.store.sql.texts import HasText
from proxy.store.sql.value_hints import may_fit
from proxy.types import Interaction, ListedSession, SessionRecord
from tokengrove.errors import InvalidRequest
from tokengrove.options.session import Credit, SessionStatus
from tokengrove.reasons import Status


def _of_root(column: ColumnElement[Any]) -> ColumnElement[Any]:
    """A column that is read for roots only."""
    return case((interactions.c.parent_id.is_(None), column)).label(str(column.key))


_INTERACTION_COLUMNS = [column for column in interactions.c if column.name not in ("idempotency_key", "checksum")]
_NAMES = [column.name for column in _INTERACTION_COLUMNS]
# Texts are most of the bytes of a row, and decoding them takes most of the time of a read. Purposes are derived only
# from the messages and tools of roots.
_WITHOUT_TEXTS = [
    null().label(column.name)
    if column.name in ("output", "asked")
    else _of_root(column)
    if column.name in ("new_messages", "tools")
    else column
    for column in _INTERACTION_COLUMNS
]
_SESSION = Statement(select(sessions).where(sessions.c.session_id == bindparam("of_session")))
_SESSION_NAMES = sessions.c.keys()


def _of_session(columns: Sequence[ColumnElement[Any]]) -> Select[Any]:
    query = select(*columns).where(interactions.c.session_id == bindparam("of_session"))
    return query.where(interactions.c.seq > bindparam("after")).order_by(interactions.c.seq)


_ALL = Statement(_of_session(_INTERACTION_COLUMNS))
_OF_STATUS = Statement(_of_session(_INTERACTION_COLUMNS).where(Named(interactions.c.status, "statuses")))
_TOKENS = Statement(_of_session(_WITHOUT_TEXTS))
# The number of sessions that are read at once to check their values.
_PAGE = 1000
_TURNS = Statement(
    _of_session([*_INTERACTION_COLUMNS, unreplied.c.interaction_id])
    .outerjoin(unreplied, unreplied.c.interaction_id == interactions.c.id)
    .where(interactions.c.seq < bindparam("before"))
)


def ping(connection: Connection) -> None:
    """Read one row to check that the database answers."""
    connection.execute(select(sessions.c.number).limit(1)).all()


def is_read_only(connection: Connection) -> bool:
    """Whether the PostgreSQL server of a connection refuses writes, like a replica. False for SQLite."""
    if connection.dialect.name == "sqlite":
        return False
    default = cast(func.current_setting("default_transaction_read_only"), Boolean)
    return bool(connection.execute(select(or_(func.pg_is_in_recovery(), default))).scalar())


def session_ids(connection: Connection, after: str, limit: int) -> list[str]:
    """At most `limit` session ids, sorted, that follow `after`; also of archived sessions."""
    ids = select(sessions.c.session_id).union_all(select(archived_sessions.c.session_id)).subquery().c.session_id
    return list(connection.execute(select(ids).where(ids > after).order_by(ids).limit(limit)).scalars())


def load_session(connection: Connection, session_id: str) -> SessionRecord | None:
    """The record of a session; None if there is no such session."""
    found = _SESSION.fetch(connection, {"of_session": session_id})
    return rows.session_of(dict(zip(_SESSION_NAMES, found[0], strict=True))) if found else None


def load_interactions(
    connection: Connection, session_id: str, after_seq: int, statuses: Collection[Status] | None
) -> list[Interaction]:
    """Interactions of a session with a seq above `after_seq`, by seq."""
    wanted = {"of_session": session_id, "after": after_seq}
    if statuses is None:
        return _interactions(_ALL.fetch(connection, wanted))
    return _interactions(_OF_STATUS.fetch(connection, {**wanted, "statuses": json_list(statuses)}))


def load_tokens(connection: Connection, session_id: str) -> list[Interaction]:
    """All interactions of a session by seq; only roots have messages."""
    return _interactions(_TOKENS.fetch(connection, {"of_session": session_id, "after": -1}))


def sessions_of(connection: Connection, interaction_ids: Collection[str]) -> set[str]:
    """The sessions that contain some of these interactions. Unknown ids are ignored."""
    query = select(interactions.c.session_id).where(interactions.c.id.in_(interaction_ids)).distinct()
    return {row.session_id for row in connection.execute(query)}


def load_turns(connection: Connection, session_id: str, begin: int, end: int) -> tuple[list[Interaction], set[str]]:
    """Interactions with `begin` <= seq < `end`, and the ids of complete ones whose reply is not noted."""
    if begin >= end:
        return [], set()
    found = _TURNS.fetch(connection, {"of_session": session_id, "after": begin - 1, "before": end})
    return _interactions(found), {row[-1] for row in found if row[-1] is not None}


def _interactions(found: Sequence[Sequence[Any]]) -> list[Interaction]:
    """The interactions of rows that begin with the columns `_NAMES`."""
    return [rows.interaction_of(dict(zip(_NAMES, row, strict=False))) for row in found]


def load_steps(connection: Connection, session_ids: Collection[str], roots: bool) -> dict[str, list[Interaction]]:
    """Interactions without tokens by session and seq, of at most MAX_SESSION_IDS sessions.

    With `roots`, roots have their messages and tools.
    """
    found: dict[str, list[Interaction]] = {name: [] for name in session_ids}
    columns = interactions.c
    texts = [
        _of_root(column) if roots else null().label(column.name) for column in (columns.new_messages, columns.tools)
    ]
    query = (
        select(*(columns[name] for name in rows.STEP_COLUMNS), *texts)
        .where(columns.session_id.in_(session_ids))
        .order_by(columns.session_id, columns.seq)
    )
    for row in connection.execute(query).mappings():
        found[row["session_id"]].append(rows.step_of(row))
    return found


def find_sessions(connection: Connection, wanted: SessionQuery) -> list[SessionRecord]:
    """The wanted sessions in order of creation. Raises InvalidRequest for an unknown cursor or too many ids."""
    return [session.record for session in find_listed(connection, wanted)]


def find_listed(connection: Connection, wanted: SessionQuery) -> list[ListedSession]:
    """Like `find_sessions`, with the values that determine the states of a session."""
    query = filtered(select(sessions), wanted)
    if wanted.after is not None:
        number = connection.execute(select(sessions.c.number).where(sessions.c.session_id == wanted.after)).scalar()
        if number is None:
            raise InvalidRequest(
                "the cursor names no session: give the cursor of the last page, or begin again if it was deleted since",
                param="cursor",
            )
        query = query.where(_beyond(number, wanted))
    if wanted.reads_values:
        return list(islice(_fitting(connection, query, wanted), wanted.limit))
    return list(map(_listed, connection.execute(_ordered(query, wanted).limit(wanted.limit)).mappings()))


def _ordered(query: Select[Any], wanted: SessionQuery) -> Select[Any]:
    return query.order_by(sessions.c.number.desc() if wanted.newest else sessions.c.number)


def _beyond(number: int, wanted: SessionQuery) -> ColumnElement[bool]:
    return sessions.c.number < number if wanted.newest else sessions.c.number > number


def _listed(row: rows.Row) -> ListedSession:
    return ListedSession(rows.session_of(row), row["next_seq"], row["revision"])


def _fitting(connection: Connection, query: Select[Any], wanted: SessionQuery) -> Iterator[ListedSession]:
    """The sessions of a query, in the wanted order, that meet the conditions on their values."""
    query = _ordered(query.where(may_fit(wanted)), wanted).limit(_PAGE)
    page = connection.execute(query).mappings().all()
    while page:
        for row in page:  # most are left out, so the others' records are decoded only
            if wanted.fits(decode_json(row["metadata"], {}), decode_json(row["metrics"], {})):
                yield _listed(row)
        page = connection.execute(query.where(_beyond(page[-1]["number"], wanted))).mappings().all()


def count_matching(connection: Connection, wanted: SessionQuery) -> int:
    """The number of wanted sessions, on all pages."""
    if wanted.reads_values:
        return sum(1 for _ in _fitting(connection, filtered(select(sessions), wanted), wanted))
    count: int = connection.execute(filtered(select(func.count()).select_from(sessions), wanted)).scalar_one()
    return count


class KeyHolder(NamedTuple):
    """The session of a key. `control`: it is a control key, not an agent's. `withdrawn`: the key was replaced.

    `feedback`: it is a feedback key, neither of them.
    """

    record: SessionRecord | None = None
    control: bool = False
    withdrawn: bool = False
    feedback: bool = False


def find_key(connection: Connection, key_hash: str) -> KeyHolder:
    """The session of a key. If several have it: the newest live one, else the newest one."""
    columns = sessions.c
    for column in (columns.api_key_hash, columns.control_key_hash, columns.feedback_key_hash):
        if (record := _session_with(connection, key_hash, column)) is not None:
            control, feedback = column is columns.control_key_hash, column is columns.feedback_key_hash
            return KeyHolder(record, control, feedback=feedback)
    return KeyHolder(withdrawn=is_withdrawn(connection, key_hash))


def _session_with(connection: Connection, key_hash: str, column: ColumnElement[Any]) -> SessionRecord | None:
    live_first = case((sessions.c.status == SessionStatus.ACTIVE.value, 0), else_=1)
    query = select(sessions).where(column == key_hash).order_by(live_first, sessions.c.number.desc()).limit(1)
    row = connection.execute(query).mappings().first()
    return None if row is None else rows.session_of(row)


def is_withdrawn(connection: Connection, key_hash: str) -> bool:
    """Whether a key of a session was replaced, or its session was deleted."""
    return bool(connection.execute(select(exists().where(withdrawn_keys.c.key_hash == key_hash))).scalar())


def last_of_series(connection: Connection, name: str) -> list[str]:
    """The ids of the last session of a series and of the one before it, if they exist."""
    ids = sessions.c.session_id
    query = select(ids).where(or_(ids == name, sessions.c.series == name))
    return list(connection.execute(query.order_by(func.length(ids).desc(), ids.desc()).limit(2)).scalars())


def find_in_series(connection: Connection, name: str, interaction_id: str) -> str | None:
    """The id of the session in a series that has an interaction; None if there is none."""
    query = select(interactions.c.session_id).join(sessions, sessions.c.session_id == interactions.c.session_id)
    of_series = or_(sessions.c.session_id == name, sessions.c.series == name)
    return connection.execute(query.where(interactions.c.id == interaction_id, of_series)).scalar()


def load_returns(connection: Connection, session_id: str) -> dict[tuple[str, float, Credit], float]:
    """All stored returns of a session by (interaction id, discount, credit rule)."""
    query = (
        select(returns.c.interaction_id, returns.c.discount, returns.c.credit, returns.c.value)
        .join(interactions, interactions.c.id == returns.c.interaction_id)
        .where(interactions.c.session_id == session_id)
    )
    return {(name, discount, Credit(credit)): value for name, discount, credit, value in connection.execute(query)}


def load_begun(connection: Connection, session_id: str) -> dict[str, float]:
    """Ids of calls that have begun and not ended, each with its start in Unix seconds."""
    query = select(intents.c.interaction_id, intents.c.begun_at).where(intents.c.session_id == session_id, PENDING)
    return {name: begun_at for name, begun_at in connection.execute(query)}


def load_unreplied(connection: Connection, session_id: str) -> set[str]:
    """Ids of complete interactions whose reply was never completely written."""
    query = select(unreplied.c.interaction_id).where(unreplied.c.session_id == session_id)
    return set(connection.execute(query).scalars())


def find_incomplete(connection: Connection, session_ids: Collection[str]) -> set[str]:
    """The sessions, of at most MAX_SESSION_IDS, with a call that failed, was aborted, or has begun and not ended."""
    lost = (Status.FAILED.value, Status.ABORTED.value)
    cut = select(interactions.c.session_id).where(
        interactions.c.session_id.in_(session_ids), interactions.c.status.in_(lost)
    )
    begun = select(intents.c.session_id).where(intents.c.session_id.in_(session_ids), PENDING)
    return set(connection.execute(cut.union(begun)).scalars())


def find_idle(connection: Connection, before: float, limit: int) -> list[str]:
    """Live sessions without a running call, and with no commit, reward or call since `before` (Unix seconds)."""
    begun = select(intents.c.session_id).where(or_(intents.c.begun_at >= before, LIVES))
    query = (
        select(sessions.c.session_id)
        .where(
            sessions.c.status == SessionStatus.ACTIVE.value,
            sessions.c.updated_at < before,
            sessions.c.session_id.not_in(begun),
        )
        .order_by(sessions.c.number)
        .limit(limit)
    )
    return list(connection.execute(query).scalars())


class LiveEpisode(NamedTuple):
    """A live session that may be cut. `updated_at`: of its last change. `followed`: its series has a later one."""

    number: int
    session_id: str
    updated_at: float
    idle_s: float | None
    followed: bool


def find_episodes(connection: Connection, after: int, limit: int) -> list[LiveEpisode]:
    """At most `limit` live sessions with options of turns, by number, from that after `after` on."""
    columns, later = sessions.c, sessions.alias()
    name = func.coalesce(columns.series, columns.session_id)
    followed = exists(select(later.c.number).where(later.c.series == name, later.c.number > columns.number))
    query = select(columns.number, columns.session_id, columns.updated_at, columns.turn_options, followed).where(
        columns.status == SessionStatus.ACTIVE.value, columns.turn_options.is_not(None), columns.number > after
    )
    found = []
    for number, session_id, updated_at, options, last in connection.execute(
        query.order_by(columns.number).limit(limit)
    ):
        rules = decode_json(options, {}).get("episodes") or {}
        found.append(LiveEpisode(number, session_id, updated_at, rules.get("idle_s"), bool(last)))
    return found


def count_sessions(connection: Connection, task_id: str) -> int:
    """The number of sessions of a task, archived ones included."""
    of_task = (select(func.count()).where(table.c.task_id == task_id) for table in (sessions, archived_sessions))
    return sum(connection.execute(query).scalar_one() for query in of_task)


def filtered(query: Select[Any], wanted: SessionQuery, table: FromClause = sessions) -> Select[Any]:
    """Restrict a query of sessions to the `wanted` ones. `table`: `sessions`, or an alias of it.

    The caller applies `after`, `limit` and the conditions on values.
    """
    columns = table.c
    conditions = [
        column == value
        for column, value in (
            (columns.group_id, wanted.group_id),
            (columns.task_id, wanted.task_id),
            (columns.status, wanted.status and wanted.status.value),
            (columns.outcome, wanted.outcome and wanted.outcome.value),
            (columns.validation, wanted.validation),
        )
        if value is not None
    ]
    if wanted.since is not None:
        conditions.append(or_(columns.ended_at.is_(None), columns.ended_at >= wanted.since))
    if wanted.ended_by is not None:
        conditions.append(columns.ended_order <= wanted.ended_by)
    if wanted.version is not None:
        conditions += _within(columns.weight_version, wanted.version)
    if wanted.duration is not None:
        conditions += _within(func.coalesce(columns.ended_at, columns.updated_at) - columns.created_at, wanted.duration)
    if wanted.trained_in is not None:
        trainer, step = wanted.trained_in
        of_step = select(annotated.c.session_id).where(annotated.c.trainer == trainer, annotated.c.step == step)
        conditions.append(columns.session_id.in_(of_step))
    if wanted.search is not None:
        named = (columns.session_id, columns.task_id, columns.group_id)
        conditions.append(or_(*(column.icontains(wanted.search, autoescape=True) for column in named)))
    if wanted.text is not None:
        conditions.append(HasText(columns.session_id, wanted.text))
    if wanted.group_ids is not None:
        conditions.append(columns.group_id.in_(wanted.group_ids))
    if wanted.withdrawn is not None:
        at = columns.withdrawn_at
        conditions.append(at.is_not(None) if wanted.withdrawn else at.is_(None))
    if wanted.rewarded is not None:
        rewarded = _is_rewarded(table)
        conditions.append(rewarded if wanted.rewarded else not_(rewarded))
    if wanted.session_ids is not None:
        if len(wanted.session_ids) > MAX_SESSION_IDS:
            raise InvalidRequest(f"'session_ids' has more than {MAX_SESSION_IDS} ids", param="session_ids")
        conditions.append(columns.session_id.in_(wanted.session_ids))
    return query.where(and_(literal(True), *conditions))


def _is_rewarded(table: FromClause) -> ColumnElement[bool]:
    """Whether a session has a complete turn with a reward."""
    turns = interactions.c
    given = or_(turns.reward.is_not(None), turns.rewards.is_not(None), turns.token_rewards.is_not(None))
    return exists(select(turns.id)).where(
        turns.session_id == table.c.session_id, turns.status == Status.COMPLETE.value, given
    )


def _within(column: ColumnElement[Any], wanted: Wanted) -> list[ColumnElement[bool]]:
    """The conditions for a number to be one of `wanted.choices`, or in the range."""
    ends = ((column.__ge__, wanted.least), (column.__le__, wanted.most))
    within = [compared(end) for compared, end in ends if end is not None]
    return [*within, column.in_(wanted.choices)] if wanted.choices else within
