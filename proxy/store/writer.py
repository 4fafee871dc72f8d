"""One thread writes: it takes all that is queued, applies it in one transaction, commits, and only then says so.

A change fails alone: when one of a group cannot be applied, the group is applied again, each change in its own
savepoint. What the database itself refuses (full, locked, I/O) fails exactly the changes of that transaction; the next
group goes on. Changes keep the order in which they came, but for new sessions and begun calls, which go first, and
reply notes, which go last: none touches what came before it, and so long runs of equal changes remain, which the
database takes at once.
Notes, which nobody waits for, cost no commit of their own: they linger for the next change that somebody waits for.
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

# The database is at fault, not one change: its transaction cannot go on.
_REFUSALS = (OperationalError, InterfaceError, InternalError)
# What a single change can be at fault for, besides a ProxyError: a value of the wrong type or size.
_FAULTS = (SQLAlchemyError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


# A transaction costs ten times what one more turn in it does. Where turns come together, a group waits this long for
# more of them, or for this many.
_GATHER_S = 0.002
_GATHER_CHANGES = 32
# How long a note may wait for company; a crash within this time may lose it.
_LINGER_S = 0.05


class Phase(IntEnum):
    """When a change is applied within its group."""

    SESSIONS = 0
    FIRST = 1
    ORDERED = 2
    LAST = 3


@dataclass(slots=True)
class Change:
    """One payload for one of the functions of `writes`, and who waits for it."""

    write: BatchWrite
    payload: Any
    phase: Phase
    future: asyncio.Future[Any] | None


ChangeResult = tuple[Change, Any]
"""A change and its result, or the exception that is its own."""
Settled = tuple[asyncio.Future[Any], Any]
Apply = Callable[[Connection, list[Change]], list[ChangeResult]]


class Writer:
    """The queue and its thread. `submit` and `note` are called on an event loop and never block it."""

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
        return not (self._closing or self._stopped)

    def submit(self, write: BatchWrite, payload: Any, phase: Phase = Phase.ORDERED) -> asyncio.Future[Any]:
        """A future of the change's result, resolved after its commit. Cancelling it does not take the change back.

        The future raises StoreUnavailable, or the ProxyError that `write` raised. Raises StoreUnavailable when closed.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(Change(write, payload, phase, future))
        return future

    def note(self, write: BatchWrite, payload: Any, phase: Phase = Phase.ORDERED) -> None:
        """Queue a change that nobody waits for; a failure is logged. Raises StoreUnavailable when closed."""
        self._put(Change(write, payload, phase, None))

    def stop(self) -> None:
        """Take no more; the thread ends when all that is queued is written. Call on the event loop."""
        if not self._closing:
            self._closing = True
            self._queue.put(None)

    def join(self) -> None:
        """Wait for the end of the thread after `stop`. Blocks."""
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
        """Wait for a change (for company, if it is a note), then take all there are; False at the end."""
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
            # The end, found while collecting, is kept for the next round.
            self._queue.put(None)
        return bool(self._group)

    def _patience(self, awaited: int) -> float:
        """How long the group may wait for more: a lone change that follows a lone one is committed at once."""
        if not awaited:
            return _LINGER_S
        return _GATHER_S if self._company and awaited < _GATHER_CHANGES else 0.0

    def _commit(self, group: list[Change]) -> list[ChangeResult]:
        """Each change with its result or its exception."""
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
                if not is_deadlock(error):  # what a replica was waiting for with us is done now
                    raise

    def _settle(self, outcomes: list[ChangeResult]) -> None:
        """Wake each event loop once (there is one, but for tests)."""
        loops: dict[asyncio.AbstractEventLoop, list[Settled]] = {}
        for change, outcome in outcomes:
            if change.future is not None:
                loops.setdefault(change.future.get_loop(), []).append((change.future, outcome))
            elif isinstance(outcome, ProxyError):
                logger.warning("a note was not stored: %s", outcome.message)
        for loop, settled in loops.items():
            # A closed loop has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(_resolve, settled)

    def _fail_rest(self) -> None:
        rest, self._group = self._group, []
        with contextlib.suppress(Empty):
            while True:
                change = self._queue.get_nowait()
                if change is not None:
                    rest.append(change)
        self._settle([(change, StoreUnavailable("the writer of the database has ended")) for change in rest])


def _without_ended_intents(group: list[Change]) -> list[Change]:
    """A call that begins and ends within one group needs no note that it began."""
    ended = {change.payload.id for change in group if change.write in (append_interactions, append_seen)}
    if not ended:
        return group
    return [c for c in group if c.write is not insert_intents or c.payload["interaction_id"] not in ended]


def _apply_runs(connection: Connection, group: list[Change]) -> list[ChangeResult]:
    """Apply runs of equal changes at once."""
    outcomes: list[ChangeResult] = []
    for write, run in groupby(sorted(group, key=_phase), key=_write):
        changes = list(run)
        outcomes += zip(changes, write(connection, [change.payload for change in changes]), strict=True)
    return outcomes


def _apply_singly(connection: Connection, group: list[Change]) -> list[ChangeResult]:
    """Apply each change in its own savepoint; one at fault has its exception as its outcome."""
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
    """The driver's own words, without the statement and its values."""
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
