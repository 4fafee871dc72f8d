"""Every change of the database, each as one function over a batch of like changes inside a transaction it is given.

They return one result per payload, in order, and raise for the batch as a whole; the writer then applies its changes
singly, so that each gets its own error. They may be applied a second time after a rollback, and change no payload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, bindparam, delete, func, insert, select, update
from sqlalchemy.exc import IntegrityError

from proxy.errors import InvalidRequest, NotFound, SessionNotFound
from proxy.store import rows
from proxy.store.tables import intents, interactions, returns, sessions
from proxy.types import Credit, Interaction, Status

Write = Callable[[Connection, Sequence[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class Rewards:
    """`updates[interaction_id]` holds those of reward, rewards, token_rewards that change."""

    session_id: str
    updates: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Returns:
    """Return of each interaction under one discount and credit rule."""

    session_id: str
    discount: float
    credit: Credit
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class End:
    """The last state of a session as a row, and its returns."""

    row: rows.Row
    returns: Returns


_INSERT_SESSION = insert(sessions)
_INSERT_INTERACTION = insert(interactions)
_INSERT_RETURN = insert(returns)
_INSERT_INTENT = insert(intents)
_SET_NEXT_SEQ = (
    update(sessions)
    .where(sessions.c.session_id == bindparam("of_session"))
    .values(next_seq=bindparam("next_seq"), updated_at=bindparam("updated_at"))
)
_DELETE_INTENT = delete(intents).where(intents.c.interaction_id == bindparam("of_interaction"))
_DELETE_RETURN = delete(returns).where(
    returns.c.interaction_id == bindparam("of_interaction"),
    returns.c.discount == bindparam("of_discount"),
    returns.c.credit == bindparam("of_credit"),
)
_SET_REPLIED = (
    update(interactions)
    .where(interactions.c.id == bindparam("of_interaction"))
    .values(replied_at=bindparam("replied_at"))
)


def create_sessions(connection: Connection, new: Sequence[rows.Row]) -> Sequence[None]:
    """Insert session rows. Raises InvalidRequest when one exists."""
    try:
        connection.execute(_INSERT_SESSION, [{**row, "next_seq": 0} for row in new])
    except IntegrityError:
        raise InvalidRequest(f"session {new[0]['session_id']} exists", param="session_id") from None
    return [None] * len(new)


def append_interactions(connection: Connection, nodes: Sequence[Interaction]) -> Sequence[int]:
    """Insert nodes; gives each its seq, in order. Raises SessionNotFound, and InvalidRequest for a known id."""
    next_seqs = _lock_sessions(connection, {node.session_id for node in nodes})
    new, seqs = [], []
    for node in nodes:
        seq = next_seqs[node.session_id]
        next_seqs[node.session_id] = seq + 1
        seqs.append(seq)
        new.append(rows.interaction_row(node, seq))
    try:
        connection.execute(_INSERT_INTERACTION, new)
    except IntegrityError:
        raise InvalidRequest(f"interaction {nodes[0].id} exists", param="interaction_id") from None
    now = time.time()
    connection.execute(
        _SET_NEXT_SEQ, [{"of_session": name, "next_seq": seq, "updated_at": now} for name, seq in next_seqs.items()]
    )
    connection.execute(_DELETE_INTENT, [{"of_interaction": node.id} for node in nodes])
    return seqs


def insert_intents(connection: Connection, new: Sequence[rows.Row]) -> Sequence[None]:
    """Record calls that began, each once."""
    drop_intents(connection, [row["interaction_id"] for row in new])
    connection.execute(_INSERT_INTENT, list({row["interaction_id"]: row for row in new}.values()))
    return [None] * len(new)


def drop_intents(connection: Connection, interaction_ids: Sequence[str]) -> Sequence[None]:
    """Forget calls that ended without an interaction."""
    connection.execute(_DELETE_INTENT, [{"of_interaction": name} for name in interaction_ids])
    return [None] * len(interaction_ids)


def set_replied(connection: Connection, replied: Sequence[rows.Row]) -> Sequence[None]:
    """Rows of `of_interaction` and `replied_at`; unknown interactions are passed over."""
    connection.execute(_SET_REPLIED, list(replied))
    return [None] * len(replied)


def set_rewards(connection: Connection, batch: Sequence[Rewards]) -> Sequence[None]:
    """Raises NotFound when an interaction is not of the session, InvalidRequest for a value that is not finite."""
    for rewards in batch:
        for name, change in rewards.updates.items():
            if change:
                _update_interaction(connection, name, rows.reward_columns(change), rewards.session_id)
    return [None] * len(batch)


def update_interactions(connection: Connection, batch: Sequence[tuple[str, rows.Row]]) -> Sequence[None]:
    """Pairs of interaction id and the columns to set. Raises NotFound."""
    for name, columns in batch:
        _update_interaction(connection, name, columns)
    return [None] * len(batch)


def supersede(connection: Connection, interaction_ids: Sequence[str]) -> Sequence[None]:
    """A retry replaces these failed or aborted attempts. Raises NotFound."""
    return update_interactions(connection, [(name, {"status": Status.SUPERSEDED.value}) for name in interaction_ids])


def update_sessions(connection: Connection, batch: Sequence[rows.Row]) -> Sequence[None]:
    """Replace every column of the record. Raises SessionNotFound."""
    for row in batch:
        name = row["session_id"]
        if not connection.execute(update(sessions).where(sessions.c.session_id == name).values(row)).rowcount:
            raise SessionNotFound(f"session {name} does not exist")
    return [None] * len(batch)


def end_sessions(connection: Connection, batch: Sequence[End]) -> Sequence[None]:
    """Seal sessions, with their returns, and give each its place in the order of ends. Raises SessionNotFound."""
    for end in batch:
        _lock_sessions(connection, {end.row["session_id"]})
        update_sessions(connection, [end.row])
        _put_returns(connection, end.returns)
        _set_ended_order(connection, end.row["session_id"])
    return [None] * len(batch)


def set_returns(connection: Connection, batch: Sequence[Returns]) -> Sequence[None]:
    """Write or overwrite returns. Raises SessionNotFound, and NotFound for an unknown interaction."""
    for each in batch:
        _lock_sessions(connection, {each.session_id})
        _put_returns(connection, each)
    return [None] * len(batch)


def _lock_sessions(connection: Connection, names: set[str]) -> dict[str, int]:
    """`next_seq` of each session, whose rows are then ours until the commit. Raises SessionNotFound."""
    # Sorted, so that two replicas never deadlock. SQLite has no row locks: its transaction has begun as the writer.
    query = (
        select(sessions.c.session_id, sessions.c.next_seq)
        .where(sessions.c.session_id.in_(names))
        .order_by(sessions.c.session_id)
        .with_for_update()
    )
    found = {name: seq for name, seq in connection.execute(query)}
    if len(found) < len(names):
        raise SessionNotFound(f"session {min(names - found.keys())} does not exist")
    return found


def _update_interaction(connection: Connection, name: str, columns: rows.Row, session_id: str | None = None) -> None:
    statement = update(interactions).where(interactions.c.id == name)
    if session_id is not None:
        statement = statement.where(interactions.c.session_id == session_id)
    if not connection.execute(statement.values(columns)).rowcount:
        raise NotFound(f"interaction {name} does not exist", param="interaction_id")


def _put_returns(connection: Connection, new: Returns) -> None:
    if not new.values:
        return
    # Delete and insert, since the two databases spell an upsert differently; the session's row is locked.
    keys = [{"of_interaction": name, "of_discount": new.discount, "of_credit": new.credit.value} for name in new.values]
    connection.execute(_DELETE_RETURN, keys)
    values = [
        {"interaction_id": name, "discount": new.discount, "credit": new.credit.value, "value": value}
        for name, value in new.values.items()
    ]
    try:
        connection.execute(_INSERT_RETURN, values)
    except IntegrityError:
        raise NotFound(f"a return of session {new.session_id} is of no interaction", param="interaction_id") from None


def _set_ended_order(connection: Connection, name: str) -> None:
    following = select(func.coalesce(func.max(sessions.c.ended_order), 0) + 1).scalar_subquery()
    connection.execute(
        update(sessions)
        .where(sessions.c.session_id == name, sessions.c.ended_order.is_(None))
        .values(ended_order=following)
    )
