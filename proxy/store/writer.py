"""Group commit: one thread applies all queued changes in one transaction, and resolves their futures after the commit.

A change fails alone: if one of a group cannot be applied, the group is applied again with each change in its own
savepoint. If the database refuses a commit (disk full, locked, I/O error), exactly the changes of that transaction
fail, and the next group proceeds. The same holds after an unexpected error.

Changes are applied in the order of the queue, except that new sessions without conditions and begun calls come first
and reply notes come last. That is safe, because none of them depends on an earlier change of the group. It gives long
runs of equal changes, which need only one statement each.

The thread wakes once per group, not once per change: a change that no caller waits for does not wake it at once, so
that it shares the commit of an urgent change. The event loop also wakes once per group, and resolves the futures of a
large group in several iterations.

While the database is unavailable (`absence`), a group is retried until it is back. If a connection was lost at a
commit, the writer first checks whether the commit was done (`sql.commit_marks`), so nothing is stored twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from enum import IntEnum
from itertools import groupby
from operator import attrgetter
from queue import SimpleQueue
from typing import Any, cast

from sqlalchemy import Connection, Engine
from sqlalchemy.exc import InterfaceError, InternalError, OperationalError, SQLAlchemyError

from proxy.store.absence import Absence, Patience
from proxy.store.faults import fault_of, is_away, is_read_only, reason_of
from proxy.store.outage import Outage
from proxy.store.sql.commit_marks import CommitMarks
from proxy.store.sql.locks import is_deadlock, is_disconnect, lock_all
from proxy.store.sql.pipeline import is_aborted, pipelined
from proxy.store.sql.statement import DriverView, as_sqlalchemy
from proxy.store.sql.writes import OF_TURNS, BatchWrite, append_interactions, set_replied
from proxy.telemetry.families import observe_all
from proxy.telemetry.groups import StoreMetrics
from tokengrove.errors import ProxyError, StoreUnavailable

logger = logging.getLogger(__name__)

# Faults of the database rather than of a change: the transaction cannot continue.
_REFUSALS = (OperationalError, InterfaceError, InternalError)
# Faults of a single change, besides ProxyError: a value of the wrong type or size.
_FAULTS = (SQLAlchemyError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


# A transaction costs ten times as much as another turn in it. If turns arrive together, a group waits this long for
# more of them, unless it already has this many changes.
_GATHER_S = 0.002
_GATHER_CHANGES = 32
# How long a change that is not urgent may wait for an urgent one. A crash within this time may lose it.
_LINGER_S = 0.05
# The largest group. After a disk stall, thousands of changes wait, and no change should wait for all of them.
_GROUP_CHANGES = 256
_GROUP_BYTES = 16 * 1024 * 1024
# The duration of a transaction from which the disk or the database is logged as slow.
_SLOW_S = 5.0
_BEHIND_CHANGES = 4 * _GROUP_CHANGES
_BEHIND_EVERY_S = 10.0
# The most futures resolved in one iteration of the event loop; all their callers run before the next iteration.
_RESOLVED_AT_ONCE = 32


class Phase(IntEnum):
    """The order in which the changes of a group are applied."""

    SESSIONS = 0
    FIRST = 1
    ORDERED = 2
    LAST = 3


@dataclass(slots=True)
class Change:
    """A payload for one of the functions of `sql.writes`.

    `future`: resolved with the result; None for a note. `urgent`: a caller waits for the commit. `size`: the
    approximate bytes that it writes, if they are many.
    """

    write: BatchWrite
    payload: Any
    phase: Phase
    future: asyncio.Future[Any] | None
    urgent: bool
    size: int = 0


ChangeResult = tuple[Change, Any]
"""A change, and its result or its exception."""
Settled = tuple[asyncio.Future[Any], Any]
Apply = Callable[[Connection, list[Change]], list[ChangeResult]]


class Writer:
    """The queue and its thread. Call `submit` and `note` on an event loop; they never block it.

    `running`: True until the writer is stopped or its thread has ended. `refusal`: the fault of the database if it
    refused the last transaction, else None. `absence`: whether it is unavailable. `reading`: the number of reads that
    wait for it, besides the queued changes. `take_along`: queues what should not come after an urgent change; called
    before each, except for the ends of turns.
    """

    def __init__(
        self,
        engine: Engine,
        metrics: StoreMetrics | None = None,
        on_read_only: Callable[[], None] = lambda: None,
        patience: Patience | None = None,
    ) -> None:
        """`on_read_only`: called in the thread when the database refuses writes, like a former primary."""
        self._engine, self._metrics, self._on_read_only = engine, metrics or StoreMetrics(), on_read_only
        self.refusal: str | None = None
        self.reading = 0
        self.absence = Absence(patience or Patience(), self._waiting)
        self._metrics.waiting.watch(lambda: self._waiting() if self.absence.since is not None else 0)
        self._marks = CommitMarks()
        self._in_doubt: list[ChangeResult] | None = None
        self._put_bytes = self._done_bytes = self._group_bytes = 0
        self._outage = Outage("commits")
        self._behind_told_at = -_BEHIND_EVERY_S
        self._begun: float | None = None
        self._renewing = False
        self._sqlite = engine.dialect.name == "sqlite"
        self._connection: Connection | None = None
        self._view: DriverView | None = None
        self._queue: deque[Change] = deque()
        self._metrics.queued.watch(self._queue.__len__)
        self.take_along: Callable[[], None] = lambda: None
        self._bell: SimpleQueue[None] = SimpleQueue()
        self._rung = False
        self._linger: asyncio.TimerHandle | None = None
        self._group: list[Change] = []
        self._company = False
        self._closing = False
        self._stopped = False
        self.running = True
        self._thread = threading.Thread(target=self._run, name="store-writer", daemon=True)
        self._thread.start()

    def submit(
        self,
        write: BatchWrite,
        payload: Any,
        phase: Phase = Phase.ORDERED,
        *,
        urgent: bool = True,
        size: int = 0,
    ) -> asyncio.Future[Any]:
        """Queue a change. The future has its result after the commit; cancelling it does not undo the change.

        A change that is not `urgent` may wait 50 ms for the commit of others. The future raises StoreUnavailable, or
        the ProxyError that `write` raised. Raises StoreUnavailable if closed.
        """
        if urgent and write is not append_interactions:
            self.take_along()
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._put(Change(write, payload, phase, future, urgent, size))
        return future

    def note(self, write: BatchWrite, payload: Any, phase: Phase = Phase.ORDERED) -> None:
        """Queue a change without waiting for it; a failure is logged. Raises StoreUnavailable if closed."""
        self._put(Change(write, payload, phase, None, False))

    def renew(self) -> None:
        """Reconnect before the next transaction. May be called in any thread."""
        self._renewing = True

    async def watch(self) -> None:
        """Log slow transactions until cancelled: the database hangs, or another client holds a lock."""
        while True:
            await asyncio.sleep(_SLOW_S)
            self.tell_of_wait()

    def tell_of_wait(self) -> None:
        """Log the running transaction if it is slow. Otherwise a hung database would not be logged until it ends."""
        begun = self._begun
        if begun is not None and (waited := time.perf_counter() - begun) >= _SLOW_S:
            logger.warning("the database does not answer", {"for_s": round(waited, 1), "queued": len(self._queue)})

    def stop(self) -> None:
        """Accept no more changes; the thread ends when the queue is written. Call on the event loop."""
        self._closing, self.running = True, False
        self.absence.stop()
        self._ring()

    def join(self) -> None:
        """Wait until the thread has ended, after `stop`. Blocks."""
        self._thread.join()

    def _put(self, change: Change) -> None:
        if self._closing:
            raise StoreUnavailable("the store is closed")
        if self.absence.since is not None and change.future is not None:
            self.check_room()
        self._put_bytes += change.size
        self._queue.append(change)
        if self._stopped:
            self._fail_rest()
        elif change.urgent:
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
            if not self._rung:  # else the thread is about to read the queue anyway
                self._rung = True
                self._bell.put(None)
        elif not (self._rung or self._linger):
            self._linger = asyncio.get_running_loop().call_later(_LINGER_S, self._wake)

    def check_room(self) -> None:
        """Raise StoreUnavailable if the limit of calls that wait for the database is reached."""
        if self.absence.is_waited_for:
            self.absence.check_room(self._waiting(), self._put_bytes - self._done_bytes)

    def _waiting(self) -> int:
        return len(self._queue) + len(self._group) + self.reading

    def _wake(self) -> None:
        """Wake the thread for all queued changes, including the ones that are not urgent."""
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._ring()

    def _ring(self) -> None:
        """Wake the thread, unless it is about to read the queue anyway."""
        if not self._rung:
            self._rung = True
            self._bell.put(None)

    def _run(self) -> None:
        try:
            while not self._closing or self._queue:  # in this order: nothing is queued once it is closing
                self._bell.get()
                self._rung = False  # before the queue is read: a change that comes later rings again
                if self._company and len(self._queue) < _GATHER_CHANGES and not self._closing:
                    time.sleep(_GATHER_S)
                full = self._take()
                if self._group:
                    self._settle(self._commit_or_fail(self._group))
                    self._group = []
                    self._done_bytes += self._group_bytes
                if full or self._closing:  # whatever else is queued has rung the bell, or lingers
                    self._ring()
        finally:
            self._stopped, self.running = True, False
            self._fail_rest()
            self._disconnect()

    def _take(self) -> bool:
        """Move the next group out of the queue. Return True if changes are left for the group after it."""
        group: list[Change] = []
        self._group = group
        awaited = size = 0
        while self._queue and len(group) < _GROUP_CHANGES and size < _GROUP_BYTES:
            change = self._queue.popleft()
            group.append(change)
            awaited += change.urgent
            size += change.size
        self._group_bytes = size
        self._company = awaited > 1
        if len(self._queue) >= _BEHIND_CHANGES and time.monotonic() - self._behind_told_at >= _BEHIND_EVERY_S:
            self._behind_told_at = time.monotonic()
            logger.warning("the database writer is behind", {"queued": len(self._queue)})
        return len(group) == _GROUP_CHANGES or size >= _GROUP_BYTES

    def _commit_or_fail(self, group: list[Change]) -> list[ChangeResult]:
        """Commit a group. An unexpected error fails only this group, and the next one reconnects."""
        try:
            return self._commit(group)
        except Exception as error:
            logger.exception("a commit failed for an unknown reason", {"changes": len(group)})
            self._metrics.refused.by[()] += 1
            with contextlib.suppress(Exception):
                self._disconnect(lost=True)
            return [(change, _unknown(error)) for change in group]

    def _commit(self, group: list[Change]) -> list[ChangeResult]:
        """Commit a group when the database is available; return each change with its result or its exception."""
        tries, doubt = 0, None
        while True:
            try:
                if doubt is None or not self._was_done(doubt):
                    doubt = None
                    doubt = self._apply(group)
                if tries:
                    self._count_waited("done")
                return doubt
            except SQLAlchemyError as error:
                doubt = self._in_doubt or doubt
                if not self._outlasts(error, tries):
                    if tries:
                        self._count_waited("refused")
                    return self._refuse(group, error)
            tries += 1

    def _apply(self, group: list[Change]) -> list[ChangeResult]:
        """Try to commit a group. Raises SQLAlchemyError if the database refuses the transaction."""
        try:
            return self._transact(group, _apply_runs, of_turns=OF_TURNS.issuperset(map(_write, group)))
        except (ProxyError, *_FAULTS) as error:
            if isinstance(error, _REFUSALS) and not is_aborted(error):
                raise
        return self._transact(group, _apply_singly)

    def _outlasts(self, error: SQLAlchemyError, tries: int) -> bool:
        """Wait a while if the database is unavailable. Return False if it is available, or calls no longer wait."""
        away = is_away(error)
        if not away or self.absence.patience.wait_s <= 0:
            self.absence.over(self.absence.since)  # it answers
            return False
        self.absence.begin(fault_of(error), reason_of(error))
        if self.absence.given_up:
            return False
        self.absence.pause(tries)
        return not self.absence.given_up

    def _was_done(self, outcomes: list[ChangeResult]) -> bool:
        """Whether a transaction was committed although its connection was lost. Raises SQLAlchemyError."""
        self._in_doubt, away = None, self.absence.since
        with self._engine.begin() as connection:
            done = self._marks.was_done(connection, outcomes)
        self.absence.over(away)
        logger.warning("a commit whose answer was lost was looked up", {"done": done, "changes": len(outcomes)})
        return done

    def _count_waited(self, result: str) -> None:
        self._metrics.waited.by["changes", result] += self._waiting() - self.reading

    def _refuse(self, group: Sequence[Change], error: Exception) -> list[ChangeResult]:
        self._metrics.refused.by[()] += 1
        self.refusal = fault_of(error)
        self._outage.refused(self.refusal, reason_of(error))
        return [(change, StoreUnavailable(f"the database refused the commit: {self.refusal}")) for change in group]

    def _transact(self, group: list[Change], apply: Apply, *, of_turns: bool = False) -> list[ChangeResult]:
        """Apply a group in a transaction. `of_turns`: it has only changes of turns, whose statements are the driver's.

        SQLite then runs them in a transaction of the driver's, and PostgreSQL in a pipeline.
        """
        while True:
            if self._renewing:
                self._renewing = False
                self._disconnect()
                self._engine.dispose()
            kept, away = self._connection is not None, self.absence.since
            outcomes: list[ChangeResult] | None = None
            self._begun = begun = time.perf_counter()
            try:
                # Kept from group to group: a checkout from the pool costs more than the other calls of a commit.
                connection = self._connection = self._connection or self._engine.connect()
                if self._sqlite and of_turns:
                    outcomes = self._apply_plainly(connection, group)
                elif self._sqlite:
                    with connection.begin():
                        outcomes = apply(connection, group)
                else:
                    with pipelined(connection) if of_turns else nullcontext(), connection.begin():
                        # The note that a reply was written changes no session.
                        lock_all(connection, [change.payload for change in group if change.write is not set_replied])
                        outcomes = apply(connection, group)
                        self._marks.leave(connection, outcomes)
                if away is not None:
                    self.absence.over(away)
                if self.refusal is not None:
                    self.refusal = None
                    self._outage.over()
                seconds = time.perf_counter() - begun
                if seconds >= _SLOW_S:
                    logger.warning("slow transaction", {"seconds": round(seconds, 1), "changes": len(group)})
                observe_all(((self._metrics.transaction, (), seconds), (self._metrics.changes, (), len(group))))
                return outcomes
            except SQLAlchemyError as error:
                gone = is_disconnect(error) or is_away(error)  # of a broken pipeline, the driver knows only the latter
                self._disconnect(lost=gone)
                if is_read_only(error):
                    self._on_read_only()
                # A kept connection may be dead. If that shows before the commit, nothing was stored.
                self._in_doubt = outcomes if gone else None
                lost = kept and outcomes is None and gone
                if not lost and not is_deadlock(error):  # after a deadlock, the other replica has gone on
                    raise
                if lost:
                    logger.warning("database connection lost, connecting again", {"reason": reason_of(error)})
            finally:
                self._begun = None

    def _apply_plainly(self, connection: Connection, group: list[Change]) -> list[ChangeResult]:
        """Apply changes of turns in a transaction of SQLite's driver, which costs less than one of SQLAlchemy."""
        view = self._view
        if view is None or view.of is not connection:
            view = self._view = DriverView(connection)
        driver: Any = view.connection.dbapi_connection
        try:
            driver.execute("BEGIN IMMEDIATE")
            try:
                outcomes = _apply_runs(cast("Connection", view), group)
                driver.commit()
            except BaseException:
                driver.rollback()
                raise
        except connection.dialect.loaded_dbapi.Error as error:
            raise as_sqlalchemy(connection, "transaction", error) from error
        return outcomes

    def _disconnect(self, *, lost: bool = False) -> None:
        """Return the connection to the pool, which resets it and checks it before its next use.

        `lost`: close it instead, because it is dead or leads to the wrong server.
        """
        connection, self._connection, self._view = self._connection, None, None
        if connection is not None:
            if lost and not connection.invalidated:
                connection.invalidate()
            connection.close()

    def _settle(self, outcomes: list[ChangeResult]) -> None:
        """Resolve the futures, with one wake-up per event loop. (Only tests have several loops.)"""
        loops: dict[asyncio.AbstractEventLoop, list[Settled]] = {}
        for change, outcome in outcomes:
            if change.future is not None:
                loops.setdefault(change.future.get_loop(), []).append((change.future, outcome))
            elif isinstance(outcome, ProxyError) and not self._outage.going_on:  # already logged, and notes may be many
                logger.warning("a note could not be stored: %(reason)s", {"reason": outcome.message})
        for loop, settled in loops.items():
            try:  # noqa: SIM105  # `suppress` would enter three functions for each commit
                loop.call_soon_threadsafe(_resolve, settled)
            except RuntimeError:  # no caller can still wait on a closed loop
                pass

    def _fail_rest(self) -> None:
        rest, self._group = self._group, []
        while self._queue:
            rest.append(self._queue.popleft())
        self._settle(
            [(change, StoreUnavailable("the database writer has stopped; restart the server")) for change in rest]
        )


def _unknown(error: Exception) -> StoreUnavailable:
    failed = StoreUnavailable(f"the commit failed: {type(error).__name__}; see the server's log")
    failed.__cause__ = error
    return failed


_phase, _write, _payload = attrgetter("phase"), attrgetter("write"), attrgetter("payload")


def _apply_runs(connection: Connection, group: list[Change]) -> list[ChangeResult]:
    """Apply each run of equal changes with one call."""
    outcomes: list[ChangeResult] = []
    for write, run in groupby(sorted(group, key=_phase), key=_write):
        changes = list(run)
        outcomes += zip(changes, write(connection, list(map(_payload, changes))), strict=True)
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
        return StoreUnavailable(f"a change cannot be stored: {reason_of(error)}")


def _resolve(settled: list[Settled]) -> None:
    for future, outcome in settled[:_RESOLVED_AT_ONCE]:
        if future.done():
            continue
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    if rest := settled[_RESOLVED_AT_ONCE:]:
        asyncio.get_running_loop().call_soon(_resolve, rest)
