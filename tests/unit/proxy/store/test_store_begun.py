"""A call that its process cut off by dying is superseded by the answer to an equal later request, by nothing else."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from proxy.store.backup import Conflict, export_all, import_all
from proxy.store.inspection import inspecting
from proxy.store.store import Store
from proxy.types import Interaction, SessionRecord
from tests.databases import execute
from tests.support import until
from tokengrove.reasons import Status

Build = Callable[..., Interaction]


@pytest.fixture
async def cut(database_url: str) -> AsyncIterator[Store]:
    """A store of a process that began after another one had died in the calls `cut` and `keyed`."""
    before = Store.open(database_url, migrate=True)
    await before.starts.create_session(SessionRecord("task-0"))
    before.turns.note_begun("cut", "task-0", "hash")
    before.turns.note_begun("keyed", "task-0", "other", "key")
    await before.close()
    store = Store.open(database_url)
    yield store
    await store.close()


@pytest.fixture
def node(node: Build) -> Build:
    """Interactions whose requests arrive now, unless they say otherwise."""
    return lambda name, **fields: node(name, **{"created_at": time.time(), **fields})


async def begun(store: Store) -> set[str]:
    return set(await store.news.load_begun("task-0"))


async def test_an_equal_answer_after_a_crash_supersedes_the_call_that_it_cut_off(cut: Store, node: Build) -> None:
    cut.turns.note_begun("new", "task-0", "hash")
    await cut.turns.append(node("new", request_hash="hash"))
    assert await begun(cut) == {"keyed"}
    assert await cut.recordings.find_incomplete({"task-0"}) == {"task-0"}
    await cut.turns.append(node("newer", request_hash="changed since", idempotency_key="key"))
    assert await begun(cut) == set()
    assert await cut.recordings.find_incomplete({"task-0"}) == set()


async def test_no_other_answer_supersedes_a_call_that_a_crash_cut_off(cut: Store, node: Build) -> None:
    await cut.starts.create_session(SessionRecord("task-1"))
    await cut.turns.append(node("elsewhere", session_id="task-1", request_hash="hash", idempotency_key="key"))
    await cut.turns.append(node("unlike", request_hash="unlike", idempotency_key="unlike"))
    await cut.turns.append(node("failed", request_hash="hash", status=Status.FAILED))
    await cut.turns.append(node("earlier", request_hash="hash", created_at=1.0))
    assert await begun(cut) == {"cut", "keyed"}


async def test_a_call_that_runs_in_this_process_is_not_superseded(cut: Store, node: Build) -> None:
    cut.turns.note_begun("running", "task-0", "hash")
    cut.turns.queue_notes()
    await cut.turns.append(node("new", request_hash="hash"))
    assert await begun(cut) == {"keyed", "running"}


@pytest.mark.parametrize("dies", ["before the answer", "after the answer"])
async def test_a_call_of_another_process_is_not_superseded_while_that_lives(
    postgres_url: str, node: Build, dies: str
) -> None:
    here, elsewhere = Store.open(postgres_url, migrate=True), Store.open(postgres_url)
    try:
        await here.starts.create_session(SessionRecord("task-0"))
        elsewhere.turns.note_begun("running", "task-0", "hash")
        await elsewhere.turns.supersede("nobody")  # returns after the note is committed
        if dies == "before the answer":
            await gone(elsewhere, postgres_url)
        await here.turns.append(node("one", request_hash="hash"))
        if dies == "after the answer":
            assert await begun(here) == {"running"}
            await gone(elsewhere, postgres_url)
        assert await begun(here) == set()
    finally:
        await elsewhere.close()
        await here.close()


async def test_an_idle_process_whose_connections_were_cut_shows_that_it_lives(postgres_url: str, node: Build) -> None:
    here, elsewhere = Store.open(postgres_url, migrate=True), Store.open(postgres_url)
    try:
        await here.starts.create_session(SessionRecord("task-0"))
        elsewhere.turns.note_begun("running", "task-0", "hash")
        await elsewhere.turns.supersede("nobody")
        of_elsewhere = f"FROM pg_stat_activity WHERE strpos(application_name, '{elsewhere.database.owner}') > 0"
        execute(postgres_url, f"SELECT pg_terminate_backend(pid) {of_elsewhere}")
        await until(lambda: execute(postgres_url, f"SELECT count(*) {of_elsewhere}") == [(0,)])
        await elsewhere.database.show_presence()
        await here.turns.append(node("one", request_hash="hash"))
        assert await begun(here) == {"running"}
    finally:
        await elsewhere.close()
        await here.close()


async def gone(store: Store, url: str) -> None:
    """Close a store, and wait until PostgreSQL has noticed."""
    await store.close()
    count = f"SELECT count(*) FROM pg_stat_activity WHERE strpos(application_name, '{store.database.owner}') > 0"
    await until(lambda: execute(url, count) == [(0,)])


async def test_a_restored_session_keeps_that_its_call_was_superseded(
    database_url: str, tmp_path: Path, cut: Store, node: Build
) -> None:
    await cut.turns.append(node("new", request_hash="hash"))
    await cut.close()
    dumped, restored = str(tmp_path / "all.jsonl"), f"sqlite:///{tmp_path / 'restored.db'}"
    export_all(database_url, dumped, lambda _: None)
    import_all(restored, Path(dumped), Conflict.REFUSE, lambda _: None)
    with inspecting(restored) as inspection:
        [stored] = inspection.sessions()
    assert stored.begun == {"keyed"}
