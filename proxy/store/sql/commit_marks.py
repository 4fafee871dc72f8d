"""Marks of transactions, to find out whether one was committed if its connection was lost at the commit (PostgreSQL).

A transaction of turns is found by their ids. A transaction with other changes leaves a mark: its number, in a row of
the writer. A transaction that can be repeated without a difference leaves nothing.

A lookup takes the lock that the transaction holds, so it waits for a transaction that the database has not finished.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from sqlalchemy import Connection, bindparam, delete, select
from sqlalchemy.dialects.postgresql import insert

from proxy.store.sql.locks import lock_sessions
from proxy.store.sql.statement import Statement
from proxy.store.sql.tables import commit_marks, interactions
from proxy.store.sql.writes import REPEATABLE, append_interactions
from proxy.types import Interaction
from tokengrove.errors import SessionNotFound

_Outcomes = Sequence[tuple[Any, Any]]
"""The changes of a transaction in their order, each with its result or its exception."""

# How long the rows of ended writers are kept. A live writer writes its row again.
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
        """Mark the transaction, unless it can be found without a mark. Call before its commit."""
        if _turns_in(outcomes) or not _has_effect(outcomes):
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
        """Whether the last transaction, which had these outcomes, was committed. False if it may be repeated anyway."""
        turns = _turns_in(outcomes)
        for turn in turns:
            with suppress(SessionNotFound):  # deleted since, with its turns: check the next one
                lock_sessions(connection, {turn.session_id})
                return bool(_TURN.fetch(connection, {"name": turn.id}))
        if turns or not _has_effect(outcomes):
            return False
        _TOUCH.run(connection, [{"writer": self._writer, "number": 0, "marked_at": time.time()}])
        [(number,)] = _LAST.fetch(connection, {"name": self._writer})
        return bool(number == self._number)


def _turns_in(outcomes: _Outcomes) -> list[Interaction]:
    """The stored turns, if there is no other effect. Their sessions existed before.

    The rows of their sessions are locked until the commit.
    """
    done = [(change, result) for change, result in outcomes if _is_effect(change, result)]
    return [change.payload.node for change, _ in done] if all(_is_turn(change) for change, _ in done) else []


def _has_effect(outcomes: _Outcomes) -> bool:
    return any(_is_effect(change, result) for change, result in outcomes)


def _is_turn(change: Any) -> bool:
    return change.write is append_interactions


def _is_effect(change: Any, result: Any) -> bool:
    """Whether repeating the change would have an effect twice, or would fail."""
    refused = isinstance(result, BaseException) or result is False or (_is_turn(change) and result is None)
    return change.write not in REPEATABLE and not refused
