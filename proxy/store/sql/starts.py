"""Conditions of a session start, checked in the transaction that creates the row.

A start that fails takes no capacity, and replicas cannot exceed a limit together. A session that fails returns its
capacity.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Connection, func, insert, or_, select, update

from proxy.store.refusals import no_capacity, too_many_live, too_stale
from proxy.store.sql import rows
from proxy.store.sql.locks import pass_alone
from proxy.store.sql.tables import capacity, sessions
from tokengrove.errors import KeyInUse, brief
from tokengrove.options.session import Outcome, SessionStatus

_STARTS, _PRUNED = "starts", "pruned"
_LIVE = sessions.c.status == SessionStatus.ACTIVE.value
_FAILURES = frozenset({Outcome.FAILED.value, Outcome.NO_DATA.value, Outcome.TIMEOUT.value})


@dataclass(frozen=True, slots=True)
class Start:
    """The row of a new session and the conditions of its start.

    `chosen_key`: the key must not belong to a live session. `max_live`: fewer sessions must be live. `max_taken`: fewer
    must be live or have ended without failing. If the row has `took_capacity`, a granted start must be left.
    """

    row: rows.RowValues
    chosen_key: bool = False
    max_live: int | None = None
    max_taken: int | None = None

    @property
    def session_id(self) -> str:
        session_id: str = self.row["session_id"]
        return session_id


def check_start(connection: Connection, start: Start) -> None:
    """Raise KeyInUse or TooManyRequests, or take the capacity that the start needs."""
    if start.chosen_key:
        _check_key(connection, start.row["api_key_hash"])
    if start.max_live is not None:
        pass_alone(connection, "live sessions")
        if count_live(connection) >= start.max_live:
            raise too_many_live(start.max_live)
    if start.max_taken is not None:
        pass_alone(connection, "live sessions")
        if count_taken(connection) >= start.max_taken:
            raise too_stale(start.max_taken)
    if start.row["took_capacity"] and not _change(connection, -1):
        raise no_capacity()


def give_back(connection: Connection, row: rows.RowValues) -> None:
    """Return the capacity of a session that ends with `row`, if it took capacity and failed or is withdrawn."""
    failed = row["status"] == SessionStatus.EXPIRED.value or row["outcome"] in _FAILURES
    if row["took_capacity"] and (failed or row["withdrawn_at"] is not None):
        _change(connection, +1)


def give_back_of_live(connection: Connection, session_id: str) -> None:
    """Return the capacity of a session that is deleted before its end, if it took capacity."""
    live = select(sessions.c.took_capacity).where(sessions.c.session_id == session_id, _LIVE)
    if connection.execute(live).scalar():
        _change(connection, +1)


def grant(connection: Connection, grants: Sequence[int]) -> Sequence[int]:
    """Grant starts, or take back at most as many as are left. Return the number left after each grant."""
    pass_alone(connection, "capacity")
    left = []
    for number in grants:
        # Locked: otherwise a concurrent start could use a grant that is about to be taken back.
        query = select(capacity.c.available).where(capacity.c.name == _STARTS).with_for_update()
        before = connection.execute(query).scalar()
        left.append(max(0, (before or 0) + number))
        if before is None:
            connection.execute(insert(capacity).values(name=_STARTS, available=left[-1]))
        else:
            _change(connection, left[-1] - before)
    return left


def count_live(connection: Connection) -> int:
    """The number of sessions that have not ended."""
    query = select(func.count()).select_from(sessions).where(_LIVE)
    return connection.execute(query).scalar_one()


def count_taken(connection: Connection) -> int:
    """The number of sessions that are trained on: live ones, and ones that ended without failing, also if pruned.

    Withdrawn sessions do not count.
    """
    there = _count_well(connection)  # first: a session that is pruned in between counts twice rather than never
    pruned = connection.execute(select(capacity.c.available).where(capacity.c.name == _PRUNED)).scalar()
    return there + (pruned or 0)


def note_pruned(connection: Connection, session_ids: Collection[str]) -> None:
    """Keep counting sessions that ended without failing and are about to be deleted, for the staleness rule."""
    pass_alone(connection, "capacity")
    number = _count_well(connection, sessions.c.session_id.in_(session_ids), ~_LIVE)
    if not _change(connection, number, _PRUNED):
        connection.execute(insert(capacity).values(name=_PRUNED, available=number))


def note_restored(connection: Connection, session_id: str) -> None:
    """Undo `note_pruned` for a session whose rows were added again."""
    pass_alone(connection, "capacity")
    _change(connection, -_count_well(connection, sessions.c.session_id == session_id, ~_LIVE), _PRUNED)


def _check_key(connection: Connection, key_hash: str) -> None:
    pass_alone(connection, "chosen keys")
    query = select(sessions.c.session_id).where(sessions.c.api_key_hash == key_hash, _LIVE)
    if (holder := connection.execute(query.limit(1)).scalar()) is not None:
        raise KeyInUse(
            f"this api_key belongs to the live session {brief(holder)}: end it first, or choose another; a start "
            "whose answer was lost is repeated as it was, with the Idempotency-Key that it had",
            param="api_key",
        )


def _count_well(connection: Connection, *which: ColumnElement[bool]) -> int:
    well = or_(sessions.c.outcome.is_(None), sessions.c.outcome.not_in(_FAILURES))
    alive, there = sessions.c.status != SessionStatus.EXPIRED.value, sessions.c.withdrawn_at.is_(None)
    return connection.execute(select(func.count()).select_from(sessions).where(well, alive, there, *which)).scalar_one()


def _change(connection: Connection, by: int, name: str = _STARTS) -> bool:
    """Add `by` to a counter. Return False, with no change, if it would be negative or does not exist."""
    statement = update(capacity).where(capacity.c.name == name, capacity.c.available + by >= 0)
    return bool(connection.execute(statement.values(available=capacity.c.available + by)).rowcount)
