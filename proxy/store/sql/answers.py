"""Answers to control calls with an Idempotency-Key, kept for a day for clients that repeat the call.

An answer is stored in the transaction of its change, so neither exists without the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, delete, insert, select
from sqlalchemy.exc import IntegrityError

from proxy.store.answer import Answer, Noted
from proxy.store.sql.tables import answers
from tokengrove.errors import StoreUnavailable

KEPT_S = 86_400.0


class AnsweredMeanwhile(StoreUnavailable):
    """An equal call was answered at the same time, by this server or another one. This call changed nothing."""


@dataclass(frozen=True, slots=True)
class Answered:
    """A change, by its function and payload, whose answer is stored with it unless it returns False."""

    write: Callable[[Connection, Sequence[Any]], Sequence[Any]]
    payload: Any
    noted: Noted

    @property
    def session_ids(self) -> Collection[str]:
        """The sessions that the change concerns: their rows are locked first."""
        name = getattr(self.payload, "session_id", None)
        return () if name is None else (name,)


def answered(connection: Connection, batch: Sequence[Answered]) -> Sequence[Any]:
    """Apply changes and store their answers. Raises what they raise, and AnsweredMeanwhile."""
    return [_answered(connection, each) for each in batch]


def find(connection: Connection, call_hash: str) -> Answer | None:
    """The answer to a call of the last day."""
    query = select(answers.c.call_hash, answers.c.request_hash, answers.c.answer)
    fresh = answers.c.answered_at > time.time() - KEPT_S
    row = connection.execute(query.where(answers.c.call_hash == call_hash, fresh)).first()
    return None if row is None else Answer(*row)


def _answered(connection: Connection, change: Answered) -> Any:
    [result] = change.write(connection, [change.payload])
    if result is False:  # another replica changed the session first; the caller decides again
        return result
    answer, now = change.noted(result), time.time()
    connection.execute(delete(answers).where(answers.c.answered_at <= now - KEPT_S))
    row = {"call_hash": answer.call_hash, "request_hash": answer.request_hash, "answer": answer.answer}
    try:
        connection.execute(insert(answers).values(**row, answered_at=now))
    except IntegrityError:
        raise AnsweredMeanwhile("an equal call is being answered; send it again") from None
    return result
