"""Changes of the database: each function applies a batch of equal changes inside a transaction.

A function returns one result per payload, in order. It raises for the whole batch; the writer then applies the changes
singly, so that each gets its own error. After a rollback a batch may be applied again: no payload is modified.

Optimistic locking: a change with a `seen` state is not made if another replica changed the session since. The result
shows this, and the caller re-reads and retries.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import chain, compress
from operator import attrgetter
from typing import Any

from sqlalchemy import (
    BindParameter,
    ColumnElement,
    Connection,
    bindparam,
    delete,
    func,
    insert,
    literal_column,
    null,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from proxy.side_columns.columns import Columns
from proxy.store.news import Seen, first_revision
from proxy.store.sql import rows
from proxy.store.sql.begun import delete_intents, insert_intents, mark_answered
from proxy.store.sql.checksums import OF_STARTS, of_end, of_start
from proxy.store.sql.images import insert_images
from proxy.store.sql.locks import lock_sessions, pass_alone
from proxy.store.sql.session_routes import note_routes
from proxy.store.sql.side_columns import column_rows, insert_columns, insert_scores
from proxy.store.sql.starts import Start, check_start, give_back
from proxy.store.sql.statement import Named, Statement, json_list
from proxy.store.sql.stored_returns import store_returns
from proxy.store.sql.tables import capacity, interactions, session_routes, sessions, unreplied, withdrawn_keys
from proxy.store.sql.webhooks import tell_of_end, tell_of_rewards
from proxy.types import ImageFile, Interaction
from tokengrove.errors import InvalidRequest, NotFound, SessionNotFound
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Status

_row_of = attrgetter("row")
REWARDS = frozenset({"reward", "rewards", "token_rewards"})
"""The fields of an interaction that are rewards."""
BatchWrite = Callable[[Connection, Sequence[Any]], Sequence[Any]]


@dataclass(slots=True)
class Append:
    """A node, and the session state on which its place in the tree is based (None: no other replica exists).

    `files`: its images that the session may not have yet. `columns`: its side columns. `noted`: the note that it began
    may be stored. `cut_off`: notes of calls may be stored that this answers instead of a process that died.
    """

    node: Interaction
    seen: Seen | None = None
    files: Sequence[ImageFile] = ()
    columns: Columns = field(default_factory=dict)
    noted: bool = True
    cut_off: bool = True

    @property
    def session_id(self) -> str:
        return self.node.session_id


@dataclass(frozen=True, slots=True)
class Rewards:
    """By interaction id: the fields that change, of reward, rewards, token_rewards, trainable and spans.

    `webhooks`: URLs that are told of rewards of an ended session.
    """

    session_id: str
    updates: Mapping[str, Mapping[str, Any]]
    seen: Seen | None = None
    webhooks: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class End:
    """The final row of a session, and the rewards of its end. `webhooks`: URLs that are told of it."""

    row: rows.RowValues
    seen: Seen | None = None
    rewards: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    webhooks: Sequence[str] = ()

    @property
    def session_id(self) -> str:
        session_id: str = self.row["session_id"]
        return session_id


@dataclass(frozen=True, slots=True)
class Withdrawal:
    """An ended session to withdraw. `at`: Unix seconds."""

    session_id: str
    at: float
    seen: Seen | None = None


@dataclass(frozen=True, slots=True)
class RecordUpdate:
    """The columns of a session's record, except for the columns of its start, and the hashes of withdrawn keys."""

    row: rows.RowValues
    seen: Seen | None = None
    withdrawn: Sequence[str] = ()

    @property
    def session_id(self) -> str:
        session_id: str = self.row["session_id"]
        return session_id


_LIVE = SessionStatus.ACTIVE.value
_NOW: BindParameter[float] = bindparam("now")
_INSERT_SESSION = Statement(insert(sessions))
_INSERT_INTERACTION = Statement(insert(interactions))
_INSERT_WITHDRAWN = Statement(insert(withdrawn_keys))
_ADVANCE = Statement(
    update(sessions)
    .where(Named(sessions.c.session_id))
    .values(next_seq=sessions.c.next_seq + bindparam("by"), updated_at=_NOW)
    .returning(sessions.c.session_id, sessions.c.next_seq, sessions.c.revision, sessions.c.status)
)
_INSERT_UNREPLIED = Statement(insert(unreplied))
_DELETE_UNREPLIED = Statement(delete(unreplied).where(Named(unreplied.c.interaction_id)))
_ONE: ColumnElement[int] = literal_column("1")
_OF_SESSION = sessions.c.session_id == bindparam("of_session")
_GROW = update(sessions).where(_OF_SESSION).values(revision=sessions.c.revision + _ONE)
# All set the columns named by their parameters, and raise the revision, so that other replicas re-read the session.
_SET_RECORD, _SET_END, _SET_WITHDRAWN, _TOUCH = (Statement(_GROW) for _ in range(4))
_SET_ENDED_ORDER = Statement(
    update(sessions)
    .where(_OF_SESSION, sessions.c.ended_order.is_(None))
    .values(ended_order=select(func.coalesce(func.max(sessions.c.ended_order) + _ONE, _ONE)).scalar_subquery())
)
# An acknowledged session keeps its claim; a running lease ends. `acknowledged_at` is what servers of older releases
# look at: every session that claims must not lease has it.
_LEAVE_QUEUE = Statement(
    update(sessions)
    .where(_OF_SESSION, sessions.c.acknowledged_at.is_(None))
    .values(acknowledged_at=_NOW, claimed_by=null(), claimed_until=null())
)
_LEAVE_QUEUES = Statement(
    update(session_routes)
    .where(session_routes.c.session_id == bindparam("of_session"), session_routes.c.acknowledged_at.is_(None))
    .values(acknowledged_at=_NOW, claimed_by=null(), claimed_until=null())
)


@cache
def _set_columns(_names: frozenset[str]) -> Statement:
    """The statement that sets the given columns of an interaction."""
    of_session = update(interactions).where(interactions.c.session_id == bindparam("of_session"))
    return Statement(of_session.where(interactions.c.id == bindparam("of_interaction")))


def create_sessions(connection: Connection, new: Sequence[Start]) -> Sequence[None]:
    """Insert session rows. Raises InvalidRequest if an id exists, KeyInUse or TooManyRequests if it may not start."""
    for start in new:
        check_start(connection, start)
        _insert_sessions(connection, [start.row])
    return [None] * len(new)


def create_freely(connection: Connection, new: Sequence[Start]) -> Sequence[None]:
    """Insert session rows in one statement, for starts without conditions. Raises InvalidRequest if an id exists."""
    _insert_sessions(connection, list(map(_row_of, new)))
    return [None] * len(new)


def _insert_sessions(connection: Connection, new: Sequence[rows.RowValues]) -> None:
    whole = []
    for row in new:
        revision = first_revision(row["created_at"])
        whole.append({**row, "checksum": of_start(row), "next_seq": 0, "revision": revision})
    try:
        _INSERT_SESSION.run(connection, whole)
    except IntegrityError:
        raise InvalidRequest(
            f"session {new[0]['session_id']} exists already: choose another id; a start whose answer was lost is "
            "repeated as it was, with the Idempotency-Key that it had",
            param="session_id",
        ) from None


def append_interactions(connection: Connection, batch: Sequence[Append]) -> Sequence[int | None]:
    """Insert nodes. Return the seq of each, or None for a node that is not inserted because its session changed.

    Raises SessionNotFound, and InvalidRequest for a known id.
    """
    counts: dict[str, int] = defaultdict(int)
    for each in batch:
        counts[each.node.session_id] += 1
    states, over = _advance(connection, counts)
    new: list[rows.RowValues] = []
    added: list[Append] = []
    seqs: list[int | None] = []
    refused: dict[str, int] = defaultdict(int)
    files: list[tuple[str, ImageFile]] = []
    beside: list[rows.RowValues] = []
    for each in batch:
        name = each.node.session_id
        next_seq, revision = state = states[name]
        if each.seen is not None and each.seen != state:
            seqs.append(None)
            refused[name] -= 1
            continue
        states[name] = next_seq + 1, revision
        seqs.append(next_seq)
        added.append(each)
        new.append(rows.interaction_row(each.node, next_seq))
        if each.files:
            files += [(name, file) for file in each.files]
        if each.columns:
            beside += column_rows(name, each.node.id, each.columns)
    if refused:
        _advance(connection, refused)
    if new:
        _insert_interactions(connection, new)
        _note_added(connection, added)
    if files:
        insert_images(connection, files)
    if beside:
        insert_columns(connection, beside)
    if over and (late := over.intersection(each.session_id for each in added)):
        store_returns(connection, late)
    return seqs


def _note_added(connection: Connection, added: Sequence[Append]) -> None:
    """Note what else follows from new interactions: calls that have ended, unwritten replies, routes of sessions."""
    noted, routed, answering, waiting = [], [], [], []
    for each in added:
        node = each.node
        if each.noted:
            noted.append(node.id)
        if node.route:
            routed.append(node)
        if each.cut_off:
            answering.append(node)
        if node.status is Status.COMPLETE:
            waiting.append({"interaction_id": node.id, "session_id": node.session_id})
    if noted:
        delete_intents(connection, noted)
    if waiting:
        _INSERT_UNREPLIED.run(connection, waiting)
    if routed:
        note_routes(connection, routed)
    if answering:
        mark_answered(connection, answering)


def _advance(connection: Connection, counts: Mapping[str, int]) -> tuple[dict[str, tuple[int, int]], set[str]]:
    """Lock sessions, and raise the `next_seq` of each by its value in `counts` (below 0: lower it).

    Returns the states before, as `Seen` has them, and the ended ones of the sessions. Raises SessionNotFound.
    """
    by_count: dict[int, list[str]] = {}
    for name, number in counts.items():
        by_count.setdefault(number, []).append(name)
    states: dict[str, tuple[int, int]] = {}
    over: set[str] = set()
    for count, names in by_count.items():
        asked = {"names": json_list(names), "by": count, "now": time.time()}
        for name, next_seq, revision, status in _ADVANCE.fetch(connection, asked):
            states[name] = next_seq - count, revision
            if status != _LIVE:
                over.add(name)
    if len(states) < len(counts):
        raise SessionNotFound(f"session {min(counts.keys() - states.keys())} does not exist")
    return states, over


def _insert_interactions(connection: Connection, new: Sequence[rows.RowValues]) -> None:
    try:
        _INSERT_INTERACTION.run(connection, new)
    except IntegrityError:
        raise InvalidRequest(f"interaction {new[0]['id']} exists", param="interaction_id") from None


def set_exported(connection: Connection, batch: Sequence[rows.RowValues]) -> Sequence[None]:
    """Set `exported_at` of the sessions `of_sessions`, except for live ones, which are not complete."""
    for row in batch:
        ended = sessions.c.session_id.in_(row["of_sessions"]) & sessions.c.ended_at.is_not(None)
        connection.execute(update(sessions).where(ended).values(exported_at=row["exported_at"]))
    return [None] * len(batch)


def add_scores(connection: Connection, batch: Sequence[Sequence[rows.RowValues]]) -> Sequence[None]:
    """Store rows of scores; those that are stored already stay as they are."""
    insert_scores(connection, [row for each in batch for row in each])
    return [None] * len(batch)


def set_replied(connection: Connection, replied: Sequence[Sequence[str]]) -> Sequence[None]:
    """Note that the replies of interactions, given by lists of ids, were written. Unknown ids are ignored."""
    _DELETE_UNREPLIED.run(connection, [{"names": json_list(chain.from_iterable(replied))}])
    return [None] * len(replied)


def set_rewards(connection: Connection, batch: Sequence[Rewards]) -> Sequence[bool]:
    """Set rewards. False if the session changed since it was seen.

    Raises NotFound if an interaction does not belong to the session, InvalidRequest for a value that is not finite.
    """
    done = [_set_rewards(connection, rewards) for rewards in batch]
    store_returns(connection, [rewards.session_id for rewards in compress(batch, done)])
    return done


def _set_rewards(connection: Connection, rewards: Rewards) -> bool:
    if not _lock_as_seen(connection, rewards.session_id, rewards.seen):
        return False
    _put_rewards(connection, rewards.session_id, rewards.updates)
    _touch(connection, rewards.session_id)
    if rewards.webhooks:
        late = [name for name, change in rewards.updates.items() if not REWARDS.isdisjoint(change)]
        if late:
            tell_of_rewards(connection, rewards.session_id, late, rewards.webhooks)
    return True


def _put_rewards(connection: Connection, session_id: str, updates: Mapping[str, Mapping[str, Any]]) -> None:
    for name, change in updates.items():
        if change:
            _update_interaction(connection, session_id, name, rows.reward_columns(change))


def supersede(connection: Connection, interaction_ids: Sequence[str]) -> Sequence[None]:
    """Mark failed or aborted interactions as replaced by a retry.

    If a failure could not be recorded, only the note that the call began exists, and is deleted. A complete interaction
    stays complete: its commit was done, although its server did not learn of it.
    """
    columns = interactions.c
    for name in interaction_ids:
        row = connection.execute(select(columns.session_id, columns.status).where(columns.id == name)).first()
        if row is None:
            delete_intents(connection, [name])
        elif row.status != Status.COMPLETE.value:
            lock_sessions(connection, {row.session_id})
            _touch(connection, row.session_id)
            _update_interaction(connection, row.session_id, name, {"status": Status.SUPERSEDED.value})
    return [None] * len(interaction_ids)


def update_sessions(connection: Connection, batch: Sequence[RecordUpdate]) -> Sequence[bool]:
    """Replace records. False if the session changed since it was seen. Raises SessionNotFound."""
    return [_update_session(connection, each) for each in batch]


def _update_session(connection: Connection, change: RecordUpdate) -> bool:
    if not _lock_as_seen(connection, change.session_id, change.seen):
        return False
    row = {name: value for name, value in change.row.items() if name not in OF_STARTS}
    statement = _SET_END if "end_checksum" in row else _SET_RECORD
    statement.run(connection, [{**row, "of_session": change.session_id}])
    if change.withdrawn:
        gone = [{"key_hash": key_hash, "session_id": change.session_id} for key_hash in change.withdrawn]
        _INSERT_WITHDRAWN.run(connection, gone)
    return True


def end_sessions(connection: Connection, batch: Sequence[End]) -> Sequence[bool]:
    """Seal sessions with their last rewards and their returns, and give each its place in the order of ends.

    Raises SessionNotFound, and NotFound for a reward of an unknown interaction. False if the session changed since it
    was seen.
    """
    done = [_end_session(connection, end) for end in batch]
    store_returns(connection, [end.session_id for end in compress(batch, done)])
    return done


def _end_session(connection: Connection, end: End) -> bool:
    row = {**end.row, "end_checksum": of_end(end.row)}
    if not _update_session(connection, RecordUpdate(row, end.seen)):
        return False
    _put_rewards(connection, end.session_id, end.rewards)
    give_back(connection, end.row)
    _set_ended_order(connection, end.session_id)
    if row["delivery"] is not None or row["withdrawn_at"] is not None:
        _leave_queue(connection, end.session_id, row["ended_at"])
    if end.webhooks:
        tell_of_end(connection, row, end.webhooks)
    return True


def withdraw_sessions(connection: Connection, batch: Sequence[Withdrawal]) -> Sequence[bool]:
    """Withdraw ended sessions. False for a session that changed since it was seen. Raises SessionNotFound."""
    return [_withdraw(connection, each) for each in batch]


def _withdraw(connection: Connection, withdrawal: Withdrawal) -> bool:
    if not _lock_as_seen(connection, withdrawal.session_id, withdrawal.seen):
        return False
    row = {"of_session": withdrawal.session_id, "withdrawn_at": withdrawal.at, "updated_at": withdrawal.at}
    _SET_WITHDRAWN.run(connection, [row])
    _leave_queue(connection, withdrawal.session_id, withdrawal.at)
    return True


def _leave_queue(connection: Connection, name: str, now: float) -> None:
    """Remove a session from the queue: no claim, of this release or an older one, can lease or acknowledge it."""
    for statement in (_LEAVE_QUEUE, _LEAVE_QUEUES):
        statement.run(connection, [{"of_session": name, "now": now}])


def _lock_as_seen(connection: Connection, session_id: str, seen: Seen | None) -> bool:
    """Lock a session; return True if it is still in the state that was seen. Raises SessionNotFound."""
    return lock_sessions(connection, {session_id})[session_id] == seen or seen is None


def _touch(connection: Connection, session_id: str) -> None:
    """Raise the revision, so that other replicas re-read the session, and mark the session as not idle."""
    _TOUCH.run(connection, [{"of_session": session_id, "updated_at": time.time()}])


def _update_interaction(connection: Connection, session_id: str, name: str, columns: rows.RowValues) -> None:
    row = {**columns, "of_interaction": name, "of_session": session_id}
    if not _set_columns(frozenset(columns)).run(connection, [row]):
        raise _unknown(name)


def _unknown(name: str) -> NotFound:
    return NotFound(f"interaction {name} does not exist", param="interaction_id")


def _set_ended_order(connection: Connection, name: str) -> None:
    pass_alone(connection, "ended order")  # two concurrent ends on two replicas must get different places
    _SET_ENDED_ORDER.run(connection, [{"of_session": name}])


def wait_for_commits(connection: Connection, batch: Sequence[rows.RowValues]) -> Sequence[None]:
    """Wait for the transactions that lock the row of a session, `of_sessions`. Raises SessionNotFound."""
    for row in batch:
        lock_sessions(connection, row["of_sessions"])
    return [None] * len(batch)


def probe(connection: Connection, batch: Sequence[None]) -> Sequence[None]:
    """Write a row and delete it again, to check that the database accepts writes."""
    name = f"probe {uuid.uuid4().hex}"
    connection.execute(insert(capacity).values(name=name, available=0))
    connection.execute(delete(capacity).where(capacity.c.name == name))
    return [None] * len(batch)


# The changes of turns. They do not need the number of rows that a statement changed, so they may run in a pipeline.
OF_TURNS: frozenset[BatchWrite] = frozenset({create_freely, insert_intents, append_interactions, set_replied})
# Repeating these changes has no further effect.
REPEATABLE: frozenset[BatchWrite] = frozenset(
    {insert_intents, delete_intents, set_replied, set_exported, add_scores, supersede, wait_for_commits, probe}
)
