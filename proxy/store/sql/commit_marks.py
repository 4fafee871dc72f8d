"""What a transaction leaves behind by which it is found again if the connection was lost at its commit (PostgreSQL).

A turn is found by its own id. Transactions that only have other changes leave a mark: the number of the transaction, in
a row of the writer's own. What can be repeated without a difference leaves nothing.

A lookup waits for a transaction that the database is still at: it takes the lock that this one holds.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.dialects.postgresql import insert

from proxy.errors import SessionNotFound
from proxy.store.sql.locks import lock_sessions
from proxy.store.sql.statement import Statement
from proxy.store.sql.tables import commit_marks, interactions
from proxy.store.sql.writes import REPEATABLE, STARTS, append_interactions
from proxy.types import Interaction

_Outcomes = Sequence[tuple[Any, Any]]
"""The changes of a transaction in their order, each with its result or its exception."""

# Rows of writers that have ended. One that goes on writes its row again.
_KEPT_S = 86_400.0

_new = insert(commit_marks)
_PUT = Statement(
    _new.on_conflict_do_update(
        index_elements=["writer"], set_={"number": _new.excluded.number, "marked_at": _new.excluded.marked_at}
    )
)
_TOUCH = Statement(_new.on_conflict_do_nothing(index_elements=["writer"]))
_LAST = Statement(select(commit_marks.c.number).where(commit_marks.c.writer == bindparam("name")).with_for_update())
_DROP_OLD = Statement(delete(commit_marks).where(commit_marks.c.marked_at < bindparam("before")))
_TURN = Statement(select(interactions.c.id).where(interactions.c.id == bindparam("name")))


class CommitMarks:
    """The marks of one writer."""

    def __init__(self) -> None:
        self._writer, self._number = uuid.uuid4().hex, 0

    def leave(self, connection: Connection, outcomes: _Outcomes) -> None:
        """Mark the transaction, if it can only be found so. Call before its commit."""
        if _turn_in(outcomes) is not None or not _has_effect(outcomes):
            return
        self.put(connection)

    def put(self, connection: Connection) -> None:
        """Mark the transaction."""
        now = time.time()
        if not self._number:
            _DROP_OLD.run(connection, [{"before": now - _KEPT_S}])
        self._number += 1
        _PUT.run(connection, [{"writer": self._writer, "number": self._number, "marked_at": now}])

    def was_done(self, connection: Connection, outcomes: _Outcomes) -> bool:
        """Whether the last transaction, which had these outcomes, was committed. False if it may simply be repeated."""
        if (turn := _turn_in(outcomes)) is not None:
            try:
                lock_sessions(connection, {turn.session_id})
            except SessionNotFound:
                return False
            return bool(_TURN.fetch(connection, {"name": turn.id}))
        if not _has_effect(outcomes):
            return False
        _TOUCH.run(connection, [{"writer": self._writer, "number": 0, "marked_at": time.time()}])
        [(number,)] = _LAST.fetch(connection, {"name": self._writer})
        return bool(number == self._number)


def _turn_in(outcomes: _Outcomes) -> Interaction | None:
    """A turn that was stored, and whose session was there before: its row is locked until the commit."""
    found = None
    for change, result in outcomes:
        if change.write in STARTS:
            return None
        if change.write is append_interactions and isinstance(result, int):
            found = change.payload.node
    return found


def _has_effect(outcomes: _Outcomes) -> bool:
    """Whether a repetition of the transaction would do something twice, or not find what it needs any more."""
    return any(
        change.write not in REPEATABLE
        and not isinstance(result, BaseException)
        and result is not False
        and not (change.write is append_interactions and result is None)
        for change, result in outcomes
    )
