"""Idle sessions leave memory and expire; sessions with running turns or waiting requests do neither."""

from __future__ import annotations

import asyncio
import gc
import itertools
import time
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from proxy.sessions import session_memory
from proxy.sessions.live_session import LiveSession
from proxy.sessions.parts import SessionParts
from proxy.settings import Settings
from proxy.store.store import Store
from proxy.telemetry.metrics import Metrics
from tests.databases import execute
from tests.support import says, serving, user
from tokengrove.options.session import SessionStatus

USES = ["running", "waiting"]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store.open(f"sqlite:///{tmp_path / 'idle.db'}")
    yield opened
    await opened.close()


@pytest.fixture
def parts(store: Store) -> SessionParts:
    return SessionParts(store, Settings(), Metrics(), lambda: 0)


async def unused_for_long(parts: SessionParts, store: Store) -> LiveSession:
    """Session `s`, last used an hour ago by every clock."""
    await parts.starter.start({"session_id": "s"})
    execute(f"sqlite:///{store.label}", "UPDATE sessions SET updated_at = updated_at - 3600")
    session = await parts.registry.get("s")
    session.record.updated_at -= 3600
    session.used_at = time.monotonic() - 3600
    return session


async def test_an_idle_session_is_forgotten_and_loaded_again(parts: SessionParts, store: Store) -> None:
    session = await unused_for_long(parts, store)
    await parts.memory.sweep()
    assert parts.registry.sessions() == []
    created_at = session.record.created_at
    del session
    assert parts.registry.find("s") is None
    loaded = await parts.registry.get("s")
    assert loaded.record.session_id == "s" and loaded.record.created_at == created_at


async def test_a_forgotten_session_that_a_request_still_holds_is_the_same_for_the_next_request(
    parts: SessionParts, store: Store
) -> None:
    session = await unused_for_long(parts, store)
    await parts.memory.sweep()
    assert parts.registry.sessions() == []
    assert await parts.registry.get("s") is session
    assert parts.registry.sessions() == [session]


async def test_a_session_without_a_row_is_not_created_twice_while_a_request_holds_it(
    parts: SessionParts, store: Store
) -> None:
    session = await parts.named.get_or_create("s")
    session.used_at -= 3600
    await parts.memory.sweep()
    assert not parts.registry.excludes("s")
    assert await parts.named.get_or_create("s") is session


@pytest.mark.parametrize("quiet", [False, True])
async def test_sessions_beyond_the_bytes_that_may_stay_leave_in_the_order_of_their_last_use(
    store: Store, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are young. While another session is in use, more may stay than in a quiet server."""
    monkeypatch.setattr(session_memory, "_KEPT_WHEN_QUIET", 250)
    parts = SessionParts(store, Settings(session_memory_bytes=450), Metrics(), lambda: 0)
    for age, name in enumerate("abcdef"):
        session = await parts.named.get_or_create(name)
        session.used_at -= 20 + age
        session.size = 100
    (await parts.named.get_or_create("b")).running = 0 if quiet else 1
    (await parts.named.get_or_create("f")).waiting = 1
    assert await parts.memory.sweep() is quiet
    assert {session.id for session in parts.registry.sessions()} == (set("af") if quiet else set("abcf"))


async def test_a_session_that_was_just_used_stays_whatever_its_size(parts: SessionParts) -> None:
    session = await parts.named.get_or_create("s")
    session.size = 2**40
    assert not await parts.memory.sweep()
    assert parts.registry.sessions() == [session]


async def test_dropped_sessions_are_freed_at_once(tmp_path: Path) -> None:
    """Their trees have no circles, which would stay until a full garbage collection."""
    async with serving(tmp_path, says("one", "two", "three")) as server:
        first = await server.answer([user("hi")])
        await server.answer([user("hi"), first, user("and")])
        await server.answer([user("hi"), first, user("or")])
        memory, registry = server.app.state.memory, server.app.state.registry
        (session,) = registry.sessions()
        session.used_at -= 3600
        tree, held = weakref.ref(session.cache), weakref.ref(session)
        gc.disable()
        try:
            del session
            await memory.sweep()
            assert tree() is None and held() is None
        finally:
            gc.enable()
        assert [node["reason"] for node in await server.tree()] == ["first", "continued", "branched"]


async def test_many_sessions_are_freed_a_few_at_a_time(parts: SessionParts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand at once would delay the turns of others by half a second."""
    monkeypatch.setattr(session_memory, "_FREED_AT_ONCE", 250)
    held = weakref.WeakSet[LiveSession]()
    for number in range(20):
        session = await parts.named.get_or_create(f"s{number}")
        session.used_at -= 3600
        session.size = 100
        held.add(session)
    del session
    left = [len(held)]
    sweep = asyncio.create_task(parts.memory.sweep())
    while not sweep.done():
        await asyncio.sleep(0)
        left.append(len(held))
    assert left[-1] == 0 and max(before - after for before, after in itertools.pairwise(left)) <= 3


@pytest.mark.parametrize("use", USES)
async def test_a_session_in_use_is_not_forgotten(parts: SessionParts, store: Store, use: str) -> None:
    session = await unused_for_long(parts, store)
    setattr(session, use, 1)
    await parts.memory.sweep()
    assert parts.registry.sessions() == [session]


async def test_an_idle_session_expires(parts: SessionParts, store: Store) -> None:
    session = await unused_for_long(parts, store)
    await parts.idle_sweep.expire_idle(60.0)
    assert session.record.status is SessionStatus.EXPIRED and session.ended.is_set()
    assert session.record.exit_reason == "unused for 60 s"


async def test_a_session_that_ended_before_it_could_expire_keeps_its_end(parts: SessionParts, store: Store) -> None:
    session = await unused_for_long(parts, store)
    await parts.endings.end(session, exit_reason="done")
    assert not await parts.endings.end(session, status=SessionStatus.EXPIRED, exit_reason="unused for 60 s")
    assert (session.record.status, session.record.exit_reason) == (SessionStatus.ENDED, "done")


@pytest.mark.parametrize("use", [*USES, "used_at"])
async def test_a_session_in_use_does_not_expire(parts: SessionParts, store: Store, use: str) -> None:
    session = await unused_for_long(parts, store)
    setattr(session, use, time.monotonic() if use == "used_at" else 1)
    await parts.idle_sweep.expire_idle(60.0)
    assert session.record.status is SessionStatus.ACTIVE


async def test_a_session_in_which_a_turn_begins_while_it_is_read_to_expire_does_not_expire(
    parts: SessionParts, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await unused_for_long(parts, store)
    refresh = parts.registry.refresh

    async def begins(read: LiveSession) -> None:
        await refresh(read)
        read.begin_turn("turn")

    monkeypatch.setattr(parts.registry, "refresh", begins)
    await parts.idle_sweep.expire_idle(60.0)
    assert session.record.status is SessionStatus.ACTIVE and session.running == 1


async def test_a_session_in_which_a_call_of_another_server_runs_does_not_expire(
    parts: SessionParts, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = await unused_for_long(parts, store)
    begun_at = time.time() - 3600.0
    with monkeypatch.context() as earlier:
        earlier.setattr(time, "time", lambda: begun_at)
        store.turns.note_begun("long", "s", "hash")
    await store.turns.supersede("another")  # commits what was noted before
    await parts.idle_sweep.expire_idle(60.0)
    assert session.record.status is SessionStatus.ACTIVE
    await store.turns.supersede("long")
    await parts.idle_sweep.expire_idle(60.0)
    assert session.record.status is SessionStatus.EXPIRED


async def test_a_session_with_a_recent_reward_does_not_expire(parts: SessionParts, store: Store) -> None:
    session = await unused_for_long(parts, store)
    await store.changes.set_rewards("s", {})  # raises `updated_at`
    await parts.idle_sweep.expire_idle(60.0)
    assert session.record.status is SessionStatus.ACTIVE


@pytest.mark.parametrize("ends", [True, False])
async def test_waiting_for_an_end_counts_as_use_until_it_is_over(parts: SessionParts, store: Store, ends: bool) -> None:
    session = await unused_for_long(parts, store)
    wait = asyncio.create_task(parts.waiter.wait_ended(["s"], 30.0 if ends else 0.0))
    if ends:
        await asyncio.sleep(0)  # the task runs until it waits for the end
        assert session.waiting == 1
        await parts.endings.end(session)
    await wait
    assert session.waiting == 0
    assert session.ended.is_set() is ends
