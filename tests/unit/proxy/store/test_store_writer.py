"""Group commit: a transaction takes all queued changes. A faulty change fails alone, a refused commit as a whole."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.exc import OperationalError

from proxy.store import database, schema, writer
from proxy.store.sql import rows, writes
from proxy.store.sql.starts import Start
from proxy.store.store import Store
from proxy.store.turn_log import TurnLog
from proxy.store.writer import Change, Phase, Writer
from proxy.telemetry.groups import StoreMetrics
from proxy.types import SessionRecord
from tests.databases import execute
from tests.support import says, serving, until, user
from tokengrove.errors import InvalidRequest, SessionNotFound, StoreUnavailable


class Held:
    """A writer that stays in its first transaction until `go` is set, and that counts its commits."""

    def __init__(self, url: str) -> None:
        self.engine = database.writer_engine(database.parse_url(url))
        schema.prepare(self.engine, migrate=True)
        self._metrics = StoreMetrics()
        self.writer = Writer(self.engine, self._metrics)
        self._entered, self._go = threading.Event(), threading.Event()
        self._first = self.writer.submit(self._hold, None)
        self._entered.wait(10)

    @property
    def commits(self) -> int:
        return sum(self._metrics.transaction.counts[()])

    async def go(self) -> None:
        self._go.set()
        await self._first

    def _hold(self, _connection: Connection, payloads: Sequence[Any]) -> Sequence[Any]:
        self._entered.set()
        self._go.wait(10)
        return payloads


@pytest.fixture
async def held(database_url: str) -> AsyncIterator[Held]:
    holder = Held(database_url)
    yield holder
    holder._go.set()
    holder.writer.stop()
    holder.writer.join()
    holder.engine.dispose()


def queue(held: Held, node: Any, *names: str) -> list[asyncio.Future[Any]]:
    return [held.writer.submit(writes.append_interactions, writes.Append(node(name))) for name in names]


async def test_all_that_is_queued_shares_one_commit(held: Held, node: Any) -> None:
    created = held.writer.submit(writes.create_freely, Start(rows.session_row(SessionRecord("task-0"))))
    appended = queue(held, node, *map(str, range(50)))
    await held.go()
    assert await asyncio.gather(created, *appended) == [None, *range(50)]
    assert held.commits == 2


async def test_a_large_queue_is_committed_in_bounded_groups(held: Held) -> None:
    groups: list[int] = []

    def write(_connection: Connection, payloads: Sequence[int]) -> Sequence[int]:
        groups.append(len(payloads))
        return payloads

    many = [held.writer.submit(write, number) for number in range(1000)]
    large = [held.writer.submit(write, number, size=5_000_000) for number in range(7)]
    await held.go()
    assert await asyncio.gather(*many, *large) == [*range(1000), *range(7)]
    assert groups == [256, 256, 256, 232 + 4, 3]


async def test_the_callers_of_a_large_group_do_not_all_run_in_one_pass_of_the_loop(held: Held) -> None:
    passes: list[int] = []

    async def call(number: int) -> None:
        await held.writer.submit(lambda _connection, payloads: payloads, number)
        passes[-1] += 1

    calls = [asyncio.create_task(call(number)) for number in range(200)]
    await asyncio.sleep(0)
    await held.go()
    while not all(task.done() for task in calls):
        passes.append(0)
        await asyncio.sleep(0)
    assert sum(passes) == 200 and max(passes) <= 32


async def test_the_row_of_a_named_session_shares_the_commit_of_its_first_turn(url: str, node: Any) -> None:
    store = Store.open(url)
    created = store.starts.create_session(SessionRecord("task-0"), urgent=False)
    store.turns.note_begun("one", "task-0", "h")
    await asyncio.sleep(0)
    assert await store.turns.append(node("one")) == 0
    assert created.done() and sum(store.metrics.transaction.counts[()]) == 1
    await store.close()


async def test_turns_are_encoded_outside_of_the_event_loop(
    store: Store, session: SessionRecord, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding: set[int] = set()
    encode = rows.interaction_row

    def noted(*args: Any) -> Any:
        encoding.add(threading.get_ident())
        return encode(*args)

    monkeypatch.setattr(rows, "interaction_row", noted)
    await store.turns.append(node("one"))
    assert encoding and threading.get_ident() not in encoding


async def test_a_change_that_is_not_urgent_is_committed_soon_without_others(store: Store) -> None:
    await store.starts.create_session(SessionRecord("task-0"), urgent=False)
    assert await store.keys.load_session("task-0") is not None


async def test_a_change_that_is_not_urgent_does_not_follow_a_commit_alone(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_LINGER_S", 60.0)
    patient = held.writer.submit(lambda _connection, payloads: payloads, 1, urgent=False)
    await held.go()
    urgent = held.writer.submit(lambda _connection, payloads: payloads, 2)
    assert await asyncio.gather(patient, urgent) == [1, 2]
    assert held.commits == 2


async def test_a_bad_change_fails_alone_in_its_group(held: Held, node: Any) -> None:
    created = held.writer.submit(writes.create_freely, Start(rows.session_row(SessionRecord("task-0"))))
    appended = queue(held, node, "a", "a", "b")
    stranger = held.writer.submit(writes.append_interactions, writes.Append(node("c", session_id="nobody")))
    broken = held.writer.submit(writes.append_interactions, writes.Append(node("d", output_ids=[1, 2])))
    last = queue(held, node, "e")
    await held.go()
    done = await asyncio.gather(created, *appended, stranger, broken, *last, return_exceptions=True)
    assert [type(one) for one in done] == [
        type(None), int, InvalidRequest, int, SessionNotFound, StoreUnavailable, int
    ]  # fmt: skip
    assert (done[1], done[3], done[6]) == (0, 1, 2)
    assert held.commits == 2


async def test_begun_calls_go_first_and_reply_notes_last(held: Held) -> None:
    order: list[str] = []

    def write(_connection: Connection, payloads: Sequence[str]) -> Sequence[str]:
        order.extend(payloads)
        return payloads

    held.writer.note(write, "replied", Phase.LAST)
    first = held.writer.submit(write, "one")
    held.writer.note(write, "begun", Phase.FIRST)
    second = held.writer.submit(write, "two")
    await held.go()
    await asyncio.gather(first, second)
    assert order == ["begun", "one", "two", "replied"]


async def test_a_group_with_a_bad_change_keeps_the_order_of_its_phases(held: Held) -> None:
    order: list[str] = []

    def write(_connection: Connection, payloads: Sequence[str]) -> Sequence[str]:
        if "bad" in payloads:
            raise InvalidRequest("bad")
        order.extend(payloads)
        return payloads

    held.writer.note(write, "replied", Phase.LAST)
    bad = held.writer.submit(write, "bad")
    good = held.writer.submit(write, "good")
    held.writer.note(write, "begun", Phase.FIRST)
    await held.go()
    await asyncio.gather(bad, good, return_exceptions=True)
    assert order == ["begun", "good", "replied"]
    assert isinstance(bad.exception(), InvalidRequest)


async def test_a_database_that_refuses_one_of_single_changes_fails_the_whole_group(held: Held) -> None:
    def write(_connection: Connection, payloads: Sequence[str]) -> Sequence[str]:
        if "bad" in payloads:
            raise InvalidRequest("bad")
        if "full" in payloads:
            raise OperationalError("INSERT", None, Exception("database or disk is full"))
        return payloads

    futures = [held.writer.submit(write, payload) for payload in ("good", "full", "bad")]
    await held.go()
    for future in futures:
        with pytest.raises(StoreUnavailable, match="refused the commit: its disk is full"):
            await future


async def test_stopping_writes_what_is_queued_and_takes_no_more(held: Held, node: Any) -> None:
    created = held.writer.submit(writes.create_freely, Start(rows.session_row(SessionRecord("task-0"))))
    [appended] = queue(held, node, "a")
    held.writer.stop()
    with pytest.raises(StoreUnavailable):
        queue(held, node, "b")
    await held.go()
    assert await asyncio.gather(created, appended) == [None, 0]


async def test_a_transaction_that_does_not_end_is_told_of_while_it_lasts(
    held: Held, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    held.writer.tell_of_wait()
    assert not caplog.records
    monkeypatch.setattr("proxy.store.writer._SLOW_S", 0.0)
    watching = asyncio.create_task(held.writer.watch())
    await until(lambda: bool(caplog.records))
    record = caplog.records[0]
    assert record.msg == "the database does not answer" and isinstance(record.args, dict) and record.args["queued"] == 0
    await held.go()
    await held.writer.submit(lambda _, payloads: payloads, None)  # the transaction before has ended by now
    watching.cancel()
    caplog.clear()
    await until(lambda: held.writer._begun is None)
    held.writer.tell_of_wait()
    assert not caplog.records


async def test_what_was_committed_before_the_end_is_not_reported_as_lost(
    url: str, node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store.open(url)
    await store.starts.create_session(SessionRecord("task-0"))
    appended = [asyncio.create_task(store.turns.append(node(str(number)))) for number in range(300)]
    await asyncio.sleep(0)
    store.turns.note_replied("0")
    await store.close()
    assert await asyncio.gather(*appended) == list(range(300))
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def create(held: Held) -> asyncio.Future[Any]:
    return held.writer.submit(writes.create_freely, Start(rows.session_row(SessionRecord("task-0"))))


class Fatal(BaseException):
    """What ends the thread of the writer."""


class Planted(Exception):
    """An exception that nothing in the store knows."""


@pytest.mark.parametrize("error", [Planted, MemoryError, RuntimeError])
async def test_an_unknown_error_fails_the_changes_of_its_commit_and_the_writer_goes_on(
    held: Held, node: Any, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_connection: Connection, _payloads: Sequence[Any]) -> Sequence[Any]:
        raise error("planted")

    together = [create(held), *queue(held, node, "a"), held.writer.submit(fail, None)]
    await held.go()
    for future in together:
        with pytest.raises(StoreUnavailable, match=error.__name__) as failed:
            await future
        assert isinstance(failed.value.__cause__, error)
    assert "a commit failed for an unknown reason" in caplog.text and "planted" in caplog.text
    assert await asyncio.gather(create(held), *queue(held, node, "a")) == [None, 0]
    assert held.writer.running and held.writer.refusal is None


async def test_an_unknown_error_while_a_broken_connection_is_closed_ends_nothing_either(
    held: Held, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise Planted

    await held.go()
    with monkeypatch.context() as broken:
        broken.setattr(held.writer, "_transact", fail)
        broken.setattr(held.writer, "_disconnect", fail)
        with pytest.raises(StoreUnavailable, match="Planted"):
            await queue(held, node, "a")[0]
    assert await asyncio.gather(create(held), *queue(held, node, "a")) == [None, 0]


async def test_a_fatal_error_of_the_writer_fails_every_waiting_write(
    held: Held, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(_connection: Connection, _payloads: Sequence[Any]) -> Sequence[Any]:
        raise Fatal

    # Python's report of the exception that ended the thread.
    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    futures = [held.writer.submit(die, None), *queue(held, node, "a")]
    await held.go()
    for future in futures:
        with pytest.raises(StoreUnavailable):
            await future
    with pytest.raises(StoreUnavailable):
        await queue(held, node, "b")[0]
    assert not held.writer.running
    held.writer.join()  # the thread reports its exception while this test's hook is installed


async def test_waiting_writes_fail_even_if_the_connection_of_a_dying_writer_cannot_be_closed(
    held: Held, node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any) -> Any:
        raise Fatal

    monkeypatch.setattr(threading, "excepthook", lambda _args: None)
    monkeypatch.setattr(held.writer, "_disconnect", die)
    futures = [held.writer.submit(die, None), *queue(held, node, "a")]
    await held.go()
    for future in futures:
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(future, 60)
    held.writer.join()
    monkeypatch.undo()
    held.writer._disconnect(lost=True)


async def test_many_changes_at_once_with_bad_ones_among_them(store: Store, session: SessionRecord, node: Any) -> None:
    nodes = [node("same" if n % 7 == 0 else f"n{n}") for n in range(140)]
    done = await asyncio.gather(*map(store.turns.append, nodes), return_exceptions=True)
    seqs = [one for one in done if isinstance(one, int)]
    assert seqs == list(range(121))
    assert sum(isinstance(one, InvalidRequest) for one in done) == 19
    assert len(await store.recordings.load_interactions("task-0")) == 121


async def test_groups_with_bad_turns_fail_alone_while_the_driver_prepares_their_statements(
    postgres_url: str, node: Any
) -> None:
    store = Store.open(postgres_url, migrate=True)
    await store.starts.create_session(SessionRecord("task-0"))
    for number in range(12):  # the driver prepares a statement at its sixth use
        name = f"task-{number + 1}"
        results = await asyncio.gather(
            store.starts.create_session(SessionRecord(name)),
            store.turns.append(node(f"good {number}")),
            store.starts.create_session(SessionRecord("task-0")),
            store.turns.append(node(f"good {number}")),
            store.turns.append(node(f"stranger {number}", session_id="nobody")),
            store.turns.append(node(f"other {number}", session_id=name)),
            return_exceptions=True,
        )
        kinds = [type(each) for each in results]
        assert kinds == [type(None), int, InvalidRequest, InvalidRequest, SessionNotFound, int], results
    assert [each.seq for each in await store.recordings.load_interactions("task-0")] == [*range(12)]
    await store.close()


async def test_the_writer_continues_after_the_database_refuses_a_write(
    store: Store, session: SessionRecord, node: Any, database_url: str
) -> None:
    execute(database_url, "ALTER TABLE interactions RENAME TO elsewhere")
    with pytest.raises(StoreUnavailable, match=r"refused|cannot be stored"):
        await store.turns.append(node("one"))
    with pytest.raises(StoreUnavailable, match=r"refused|cannot be stored"):
        await store.recordings.load_interactions("task-0")
    execute(database_url, "ALTER TABLE elsewhere RENAME TO interactions")
    assert await store.turns.append(node("one")) == 0


async def test_a_failed_note_is_logged_and_fails_no_other(
    store: Store, session: SessionRecord, node: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store.turns.note_begun(None, "task-0", "h")  # type: ignore[arg-type]
    store.turns.queue_notes()
    assert await store.turns.append(node("one")) == 0
    assert "a note could not be stored" in caplog.text


async def test_ping_answers_until_the_store_is_closed(url: str, node: Any) -> None:
    store = Store.open(url)
    await store.ping()
    await store.close()
    await store.close()
    for call in (store.ping(), store.turns.append(node()), store.keys.load_session("x")):
        with pytest.raises(StoreUnavailable):
            await call


async def test_the_row_of_a_session_is_queued_before_the_calls_that_began_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a crash between two groups leaves begun calls of no session."""
    note_begun = TurnLog.note_begun

    def note_at_once(log: TurnLog, *call: Any) -> None:  # else such short turns leave no notes
        note_begun(log, *call)
        log.queue_notes()

    monkeypatch.setattr(TurnLog, "note_begun", note_at_once)
    queued: list[tuple[str, Phase]] = []
    put = Writer._put

    def record(writer: Writer, change: Change) -> None:
        if change.phase is Phase.SESSIONS:
            queued.append((change.payload.row["session_id"], change.phase))
        elif change.phase is Phase.FIRST:
            queued.append((change.payload["session_id"], change.phase))
        put(writer, change)

    monkeypatch.setattr(Writer, "_put", record)
    async with serving(tmp_path, says(*"abc")) as server:
        await asyncio.gather(*(server.chat([user("hi")], name) for name in "xyz"))
    assert sorted(queued) == sorted((name, phase) for name in "xyz" for phase in (Phase.SESSIONS, Phase.FIRST))
    for name in "xyz":
        assert [phase for session, phase in queued if session == name] == [Phase.SESSIONS, Phase.FIRST]
