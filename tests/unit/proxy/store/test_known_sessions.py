"""Ids of sessions in memory exclude a session only while all ids are known. They are read after the first question."""

from __future__ import annotations

import asyncio

import pytest

from proxy.store import known_sessions
from proxy.store.known_sessions import KnownSessions
from tokengrove.errors import StoreUnavailable


class Rows:
    """Stored ids, and the reads of them. A read waits while `held`; it fails while `failing`."""

    def __init__(self, *ids: str) -> None:
        self.ids, self.reads, self.failing = sorted(ids), 0, False
        self.held = asyncio.Event()
        self.held.set()

    async def read(self, after: str, limit: int) -> list[str]:
        self.reads += 1
        await self.held.wait()
        if self.failing:
            raise StoreUnavailable("the disk is gone")
        return [name for name in self.ids if name > after][:limit]


async def read_all(known: KnownSessions) -> None:
    """Ask, and wait until what that began to read is read."""
    known.exclude("?")
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})


async def test_a_session_is_excluded_until_it_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_sessions, "_PAGE", 2)
    known = KnownSessions(Rows(*"ace").read)
    await read_all(known)
    assert known.exclude("b") and not any(map(known.exclude, "ace"))
    known.add("b")
    assert not known.exclude("b")


async def test_nothing_is_read_before_the_first_question_and_nothing_twice() -> None:
    rows = Rows("a")
    known = KnownSessions(rows.read)
    assert rows.reads == 0
    await read_all(known)
    assert known.exclude("b") and known.exclude("c")
    assert rows.reads == 2  # the page, and the one behind it


async def test_nothing_is_excluded_while_ids_are_read_and_what_is_added_meanwhile_is_known() -> None:
    rows = Rows("a")
    rows.held.clear()
    known = KnownSessions(rows.read)
    assert not known.exclude("b")
    known.add("b")
    rows.held.set()
    await read_all(known)
    assert known.exclude("c") and not known.exclude("a") and not known.exclude("b")


async def test_after_a_failed_read_the_next_question_reads_again() -> None:
    rows = Rows("a")
    rows.failing = True
    known = KnownSessions(rows.read)
    await read_all(known)
    assert not known.exclude("b")
    rows.failing = False
    await read_all(known)
    assert known.exclude("b") and not known.exclude("a")


def test_nothing_is_excluded_if_others_may_add_sessions() -> None:
    known = KnownSessions(None)
    known.add("a")
    assert not known.exclude("b")


async def test_nothing_is_excluded_once_there_are_too_many_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_sessions, "MAX_KNOWN", 2)
    known, rows = KnownSessions(Rows("a", "b").read), Rows("a", "b", "c")
    await read_all(known)
    assert known.exclude("c")
    known.add("c")
    assert not known.exclude("d")
    known = KnownSessions(rows.read)
    await read_all(known)
    assert not known.exclude("d")


async def test_an_id_that_fills_the_memory_to_its_limit_is_still_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_sessions, "MAX_KNOWN", 2)
    known = KnownSessions(Rows("a").read)
    await read_all(known)
    known.add("b")
    assert known.exclude("c")
