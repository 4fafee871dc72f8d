"""Group commit: one thread applies all queued changes in one transaction, and resolves their futures after the commit.

A change fails alone: if one of a group cannot be applied, the group is applied again with each change in its own
savepoint. If the database refuses a commit (disk full, locked, I/O error), exactly the changes of that transaction
fail, and the next group proceeds.

Changes are applied in the order of the queue, except that new sessions and begun calls come first and reply notes come
last. That is safe, since none of them depends on an earlier change of the group; and it leaves long runs of equal
changes, which the database takes in one statement.

No caller waits for a note, so a group of notes waits briefly to share the commit of a change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from queue import Empty, SimpleQueue
from typing import Any

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError

from proxy.errors import ProxyError, StoreUnavailable
from proxy.store.sql.locks import is_deadlock, lock_all
from proxy.store.sql.writes import BatchWrite, append_interactions, append_seen, insert_intents

logger = logging.getLogger(__name__)

# The fault of the database rather than of a change: the transaction cannot continue.
_REFUSALS = (OperationalError, InterfaceError, InternalError)
# The fault of a single change, besides a ProxyError: a value of the wrong type or size.
_FAULTS = (SQLAlchemyError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


# A transaction costs ten times as much as one more turn in it. If turns arrive together, a group waits this long for
# more of them, or until it has this many.
_GATHER_S = 0.002
_GATHER_CHANGES = 32
# How long a note may wait for a change that is waited for. A crash within this time may lose the note.
_LINGER_S = 0.05


class Phase(IntEnum):
    """The order in which the changes of a group are applied."""

    SESSIONS = 0
    FIRST = 1
    ORDERED = 2
    LAST = 3


@dataclass(slots=True)
class Change:
    """A payload for one of the functions of `sql.writes`. `future`: resolved with the result; None for a note."""

    write: BatchWrite
    payload: Any
    phase: Phase
    future: asyncio.Future[Any] | None


ChangeResult = tuple[Change, Any]
"""A change, and its result or its exception."""
Settled = tuple[asyncio.Future[Any], Any]
Apply = Callable[[Connection, list[Change]], list[ChangeResult]]


class Writer:
    """The queue and its thread. Call `submit` and `note` on an event loop; they never block it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._queue: SimpleQueue[Change | None] = SimpleQueue()
        self._group: list[Change] = []
        self._company = False
        self._closing = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        """True until the writer is stopped or its thread has ended."""
        return not (self._closing or self._stopped)

    def submit(self, write: BatchWrite, payload: Any, phase: Phase = Phase.ORDERED) -> asyncio.Future[Any]:
        """Queue a change. The future has its result after the commit; cancelling it does not undo the change.

        The future raises StoreUnavailable, or the ProxyError that `write` raised. Raises StoreUnavailable if closed.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(Change(write, payload, phase, future))
        return future

    def note(self, write: BatchWrite, payload: Any, phase: Phase = Phase.ORDERED) -> None:
        """Queue a change without waiting for it; a failure is logged. Raises StoreUnavailable if closed."""
        self._put(Change(write, payload, phase, None))

    def stop(self) -> None:
        """Accept no more changes; the thread ends when the queue is written. Call on the event loop."""
        if not self._closing:
            self._closing = True
            self._queue.put(None)

    def join(self) -> None:
        """Wait until the thread has ended, after `stop`. Blocks."""
        self._thread.join()

    def _put(self, change: Change) -> None:
        if self._closing:
            raise StoreUnavailable("the store is closed")
        self._queue.put(change)
        if self._stopped:
            self._fail_rest()

    def _run(self) -> None:
        try:
            while self._take():
                self._settle(self._commit(_without_ended_intents(self._group)))
        finally:
            self._stopped = True
            self._fail_rest()

    def _take(self) -> bool:
        """Collect the next group: wait for a change, then take what is queued. Return False at the end."""
        self._group = []
        change = self._queue.get()
        begun = time.monotonic()
        awaited = 0
        with contextlib.suppress(Empty):
            while change is not None:
                self._group.append(change)
                awaited += change.future is not None
                left = begun + self._patience(awaited) - time.monotonic()
                change = self._queue.get(left > 0, max(left, 0.0))
        self._company = awaited > 1
        if change is None:
            # Put the end marker back, for the next round.
            self._queue.put(None)
        return bool(self._group)

    def _patience(self, awaited: int) -> float:
        """Seconds that the group waits for more changes. A lone change after a lone one is committed at once."""
        if not awaited:
            return _LINGER_S
        return _GATHER_S if self._company and awaited < _GATHER_CHANGES else 0.0

    def _commit(self, group: list[Change]) -> list[ChangeResult]:
        """Commit a group; return each change with its result or its exception."""
        try:
            return self._transact(group, _apply_runs)
        except (ProxyError, *_FAULTS) as error:
            if isinstance(error, _REFUSALS):
                return _refused(group, error)
        try:
            return self._transact(group, _apply_singly)
        except SQLAlchemyError as error:
            return _refused(group, error)

    def _transact(self, group: list[Change], apply: Apply) -> list[ChangeResult]:
        while True:
            try:
                with self._engine.begin() as connection:
                    lock_all(connection, [change.payload for change in group])
                    outcomes = apply(connection, group)
                return outcomes
            except OperationalError as error:
                if not is_deadlock(error):  # a deadlock with another replica, which has gone on: try again
                    raise

    def _settle(self, outcomes: list[ChangeResult]) -> None:
        """Resolve the futures, with one wake-up per event loop. (Only tests have several loops.)"""
        loops: dict[asyncio.AbstractEventLoop, list[Settled]] = {}
        for change, outcome in outcomes:
            if change.future is not None:
                loops.setdefault(change.future.get_loop(), []).append((change.future, outcome))
            elif isinstance(outcome, ProxyError):
                logger.warning("a note could not be stored: %s", outcome.message)
        for loop, settled in loops.items():
            # No caller can still wait on a closed loop.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, settled)

    def _fail_rest(self) -> None:
        rest, self._group = self._group, []
        with contextlib.suppress(Empty):
            while True:
                change = self._queue.get_nowait()
                if change is not None:
                    rest.append(change)
        self._settle(
            [(change, StoreUnavailable("the database writer has stopped; restart the server")) for change in rest]
        )


def _without_ended_intents(group: list[Change]) -> list[Change]:
    """Drop the begin notes of calls that end in the same group."""
    ended = {change.payload.id for change in group if change.write in (append_interactions, append_seen)}
    if not ended:
        return group
    return [c for c in group if c.write is not insert_intents or c.payload["interaction_id"] not in ended]


def _apply_runs(connection: Connection, group: list[Change]) -> list[ChangeResult]:
    """Apply each run of equal changes with one call."""
    outcomes: list[ChangeResult] = []
    for write, run in groupby(sorted(group, key=_phase), key=_write):
        changes = list(run)
        outcomes += zip(changes, write(connection, [change.payload for change in changes]), strict=True)
    return outcomes


def _apply_singly(connection: Connection, group: list[Change]) -> list[ChangeResult]:
    """Apply each change in its own savepoint; the result of a faulty change is its exception."""
    return [(change, _apply_one(connection, change)) for change in sorted(group, key=_phase)]


def _apply_one(connection: Connection, change: Change) -> Any:
    try:
        with connection.begin_nested():
            return change.write(connection, [change.payload])[0]
    except ProxyError as error:
        return error
    except _FAULTS as error:
        if isinstance(error, _REFUSALS):
            raise
        return StoreUnavailable(f"a change cannot be stored: {_reason(error)}")


def _refused(group: Sequence[Change], error: Exception) -> list[ChangeResult]:
    logger.error("the database refused a commit of %d changes: %s", len(group), _reason(error))
    return [(change, StoreUnavailable(f"the database refused the commit: {_reason(error)}")) for change in group]


def _reason(error: BaseException) -> str:
    """The message of the driver, without the statement and its values."""
    return str(getattr(error, "orig", None) or error)


def _phase(change: Change) -> Phase:
    return change.phase


def _write(change: Change) -> BatchWrite:
    return change.write


def _resolve(settled: list[Settled]) -> None:
    for future, outcome in settled:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
