"""Replicas share a database: changes based on an old state are refused, all changes are news, none deadlocks."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from sqlalchemy import Connection

from proxy.store import shared_reads
from proxy.store.news import InArchive, News, Seen
from proxy.store.sql import locks, reads
from proxy.store.sql.revisions import Wanted
from proxy.store.store import Store
from proxy.types import Interaction, SessionRecord
from tests.databases import execute
from tests.wide import CROSSED
from tokengrove.options.session import SessionStatus
from tokengrove.reasons import Status

Build = Callable[..., Interaction]
CHANGES: dict[str, Callable[[Store], Any]] = {
    "rewards": lambda store: store.changes.set_rewards("task-0", {"one": {"reward": 1.0}}),
    "mark": lambda store: store.changes.set_rewards("task-0", {"one": {"trainable": False, "spans": ((0, 1),)}}),
    "supersede": lambda store: store.turns.supersede("two"),
    "update": lambda store: store.changes.update_session(SessionRecord("task-0", api_key_hash="new")),
    "end": lambda store: store.changes.end_session(SessionRecord("task-0", status=SessionStatus.ENDED)),
}


@pytest.fixture
async def pair(postgres_url: str) -> AsyncIterator[Sequence[Store]]:
    """Two stores on one PostgreSQL database."""
    stores = [Store.open(postgres_url, migrate=True) for _ in range(2)]
    yield stores
    for store in stores:
        await store.close()


async def seen(store: Store) -> Seen:
    news = await store.news.load_news("task-0", Seen())
    assert news is not None
    return news.seen


@pytest.mark.usefixtures("session")
async def test_a_turn_that_was_placed_on_an_old_state_is_not_committed(store: Store, node: Build) -> None:
    first, second = await asyncio.gather(
        store.turns.append(node("one"), Seen(0, 0)), store.turns.append(node("two"), Seen(0, 0))
    )
    assert {first, second} == {0, None}
    assert await store.turns.append(node("three"), Seen(1, 1)) is None
    store.turns.note_begun("four", "task-0", "h")
    late = node("four")
    assert await store.turns.append(late, Seen(0, 0)) is None
    assert late.seq == -1
    assert [each.seq for each in await store.recordings.load_interactions("task-0")] == [0]
    assert await store.turns.append(late, await seen(store)) == late.seq == 1
    assert await store.news.load_begun("task-0") == {}


@pytest.mark.usefixtures("session")
async def test_a_turn_that_failed_is_recorded_on_any_state(store: Store, node: Build) -> None:
    await store.turns.append(node("one"))
    assert await store.turns.append(node("two", status=Status.FAILED)) == 1


@CROSSED
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("stale", [Seen(0, 0), Seen(1, 1), Seen(2, 0)])
async def test_rewards_ends_and_records_of_an_old_state_change_nothing(store: Store, node: Build, stale: Seen) -> None:
    await store.turns.append(node("one"))
    record = SessionRecord("task-0", status=SessionStatus.ENDED)
    assert not await store.changes.set_rewards("task-0", {"one": {"reward": 1.0}}, stale)
    assert not await store.changes.end_session(record, stale)
    assert not await store.changes.update_session(record, stale)
    stored = await store.keys.load_session("task-0")
    assert stored is not None and stored.status is SessionStatus.ACTIVE
    assert [each.reward for each in await store.recordings.load_interactions("task-0")] == [None]
    assert await store.database.read(reads.load_returns, "task-0") == {}
    assert await seen(store) == Seen(1, 0)
    assert await store.changes.end_session(record, Seen(1, 0))


@CROSSED
@pytest.mark.usefixtures("session")
@pytest.mark.parametrize("change", CHANGES)
async def test_every_change_but_turns_grows_the_revision_and_is_news(store: Store, node: Build, change: str) -> None:
    await store.turns.append(node("one"))
    await store.turns.append(node("two", status=Status.FAILED))
    assert await seen(store) == Seen(2, 0)
    await CHANGES[change](store)
    news = await store.news.load_news("task-0", Seen(2, 0))
    assert news is not None
    assert news.seen == Seen(2, 1)
    assert news.record == await store.keys.load_session("task-0")
    stored = await store.recordings.load_interactions("task-0")
    assert [(m.interaction_id, m.status, m.reward, m.trainable, m.spans) for m in news.changed] == [
        (i.id, i.status, i.reward, i.trainable, i.spans) for i in stored
    ]


@pytest.mark.usefixtures("session")
async def test_news_contain_only_unseen_changes(store: Store, node: Build) -> None:
    for name in ("one", "two", "three"):
        await store.turns.append(node(name))
    store.turns.note_replied("two")
    store.turns.queue_notes()
    await store.changes.set_rewards("task-0", {"one": {"trainable": True}})
    news = await store.news.load_news("task-0", Seen(1, 1))
    assert news is not None
    assert (news.seen, news.record, list(news.changed)) == (Seen(3, 1), None, [])
    assert [each.id for each in news.interactions] == ["two", "three"]
    assert "two" not in news.unreplied and "three" in news.unreplied
    assert await store.news.load_news("task-0", Seen(3, 1)) == News(Seen(3, 1), None, [], set(), ())
    assert await store.news.load_news("nobody", Seen()) is None


async def test_live_sessions_are_those_that_have_not_ended(store: Store) -> None:
    for name in ("a", "b", "c"):
        await store.starts.create_session(SessionRecord(name))
    await store.changes.end_session(SessionRecord("b", status=SessionStatus.ENDED))
    assert await store.news.live_sessions(["a", "b", "nobody"]) == {"a"}


async def test_replicas_that_change_the_same_sessions_in_any_order_come_to_no_deadlock(
    pair: Sequence[Store], node: Build, postgres_url: str
) -> None:
    names = [f"s{n:02}" for n in range(12)]
    for name in names:
        await pair[0].starts.create_session(SessionRecord(name))
        await pair[0].turns.append(node(f"{name}-first", session_id=name))

    async def change(store: Store, name: str, turn: int) -> None:
        if turn % 3:
            await store.turns.append(node(f"{name}-{id(store)}-{turn}", session_id=name))
        else:
            store.turns.note_replied(f"{name}-first")
            store.turns.queue_notes()
            await store.changes.set_rewards(name, {f"{name}-first": {"reward": float(turn)}})

    for turn in range(30):
        orders = (names, names[::-1])
        await asyncio.gather(
            *(
                change(store, name, turn + at)
                for store, order in zip(pair, orders, strict=True)
                for at, name in enumerate(order)
            )
        )
    for store in pair:
        await store.close()  # PostgreSQL counts deadlocks when a connection closes
    (row,) = execute(postgres_url, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")
    assert row == (0,)


async def test_of_two_transactions_in_a_deadlock_both_are_made_in_the_end(pair: Sequence[Store]) -> None:
    for name in ("a", "b"):
        await pair[0].starts.create_session(SessionRecord(name))
    meeting, met = threading.Barrier(2), threading.Event()

    def lock(*names: str) -> Callable[[Connection, Sequence[Any]], Sequence[Any]]:
        def write(connection: Connection, payloads: Sequence[Any]) -> Sequence[Any]:
            for name in names:
                locks.lock_sessions(connection, {name})
                if not met.is_set():
                    meeting.wait(60)
                    met.set()
            return ["done"] * len(payloads)

        return write

    first = pair[0].database.write.submit(lock("a", "b"), None)
    second = pair[1].database.write.submit(lock("b", "a"), None)
    assert await asyncio.gather(first, second) == ["done", "done"]


async def test_a_replica_goes_on_after_the_database_dropped_its_connections(
    pair: Sequence[Store], postgres_url: str, node: Build
) -> None:
    store = pair[0]
    await store.starts.create_session(SessionRecord("task-0"))
    for number in range(3):
        assert await store.turns.append(node(f"n{number}"), await seen(store)) == number
        execute(
            postgres_url,
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )


async def test_requests_for_the_state_of_sessions_share_queries(
    pair: Sequence[Store], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, names = pair[0], [f"s{n}" for n in range(20)]
    for name in names:
        await store.starts.create_session(SessionRecord(name))
    asked: list[list[str]] = []
    load = shared_reads.load_new_turns

    def counted(connection: Connection, wanted: Sequence[Wanted]) -> list[News | InArchive | Exception | None]:
        asked.append([name for name, _ in wanted])
        return load(connection, wanted)

    monkeypatch.setattr(shared_reads, "load_new_turns", counted)
    found = await asyncio.gather(*(store.news.load_news(name, Seen()) for name in [*names, "nobody", *names]))
    assert [news and news.seen for news in found] == [*[Seen()] * 20, None, *[Seen()] * 20]
    assert asked == [[*names, "nobody", *names]]


async def test_that_a_session_is_new_or_archived_is_read_in_the_shared_query(
    pair: Sequence[Store], postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = pair[0]
    execute(
        postgres_url,
        "INSERT INTO archived_sessions (session_id, file, number, task_id, ended_at, turns, archived_at)"
        " VALUES ('old', 'file:///a.parquet', 1, 't', 0, 2, 0)",
    )
    monkeypatch.setattr(store.database, "read_at_once", None)
    found = await asyncio.gather(*(store.news.load_news(name, Seen()) for name in ("nobody", "old")))
    assert found == [None, InArchive("file:///a.parquet")]


async def test_a_damaged_turn_fails_the_requests_of_its_session_alone(
    pair: Sequence[Store], node: Build, postgres_url: str
) -> None:
    one, two = pair
    for name in ("whole", "damaged"):
        await one.starts.create_session(SessionRecord(name))
        await one.turns.append(node(name, session_id=name))
    execute(postgres_url, "UPDATE interactions SET output = 'x' WHERE id = 'damaged'")
    found = await asyncio.gather(
        *(two.news.load_news(name, Seen()) for name in ("damaged", "whole")), return_exceptions=True
    )
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], News) and [turn.id for turn in found[1].interactions] == ["whole"]


async def test_a_state_that_is_asked_for_during_a_query_is_of_a_later_query(
    pair: Sequence[Store], node: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = pair
    await one.starts.create_session(SessionRecord("task-0"))
    running, go = threading.Event(), threading.Event()
    load = shared_reads.load_new_turns

    def held(connection: Connection, wanted: Sequence[Wanted]) -> list[News | Exception | None]:
        news = load(connection, wanted)
        running.set()
        go.wait(60)
        return news

    monkeypatch.setattr(shared_reads, "load_new_turns", held)
    early = asyncio.create_task(one.news.load_news("task-0", Seen()))
    await asyncio.to_thread(running.wait, 60)
    await two.turns.append(node("one"))
    late = asyncio.create_task(one.news.load_news("task-0", Seen()))
    await asyncio.sleep(0)
    go.set()
    found = [news and (news.seen, [each.id for each in news.interactions]) for news in (await early, await late)]
    assert found == [(Seen(0, 0), []), (Seen(1, 0), ["one"])]


async def test_sessions_that_end_at_once_on_two_replicas_have_an_order(
    pair: Sequence[Store], postgres_url: str
) -> None:
    records = [SessionRecord(f"s{n}") for n in range(20)]
    for record in records:
        await pair[0].starts.create_session(record)
    ended = [replace(record, status=SessionStatus.ENDED) for record in records]
    await asyncio.gather(*(pair[n % 2].changes.end_session(record) for n, record in enumerate(ended)))
    orders = [row[0] for row in execute(postgres_url, "SELECT ended_order FROM sessions")]
    assert sorted(orders) == list(range(1, 21))
