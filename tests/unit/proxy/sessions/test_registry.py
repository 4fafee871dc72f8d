"""Refreshing a session whose row is committed, here or by another replica, or deleted, while the store is queried."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.sessions.keys import Keyring
from proxy.sessions.live_session import LiveSession
from proxy.sessions.registry import Registry
from proxy.store.news import News, first_seen
from proxy.telemetry.metrics import Metrics
from proxy.trajectory.cache import InteractionCache
from proxy.types import SessionRecord
from tests.support import until
from tokengrove.errors import SessionNotFound


class EmptyNews:
    """News of an empty store that replicas share. The row of the session `meanwhile` is committed during the query."""

    shared = True

    def __init__(self) -> None:
        self.meanwhile: LiveSession | None = None

    async def load_news(self, session_id: str, seen: Any) -> None:
        if self.meanwhile is not None:
            self.meanwhile.confirmed = True

    def excludes(self, session_id: str) -> bool:
        return False


def live(news: Any, *, confirmed: bool) -> tuple[Registry, LiveSession]:
    registry = Registry(news, Keyring(news, None), Metrics())
    session = registry.add(LiveSession(SessionRecord("s"), InteractionCache(), confirmed=confirmed))
    return registry, session


async def test_a_row_inserted_during_the_lookup_leaves_the_session_unchanged() -> None:
    news = EmptyNews()
    registry, session = live(news, confirmed=False)
    news.meanwhile = session
    assert await registry.get("s") is session
    assert registry.find("s") is session and not session.ended.is_set()


class NewsOf(EmptyNews):
    """News of a store that has one row, which another replica created."""

    def __init__(self, record: SessionRecord) -> None:
        super().__init__()
        self.record = record

    async def load_news(self, session_id: str, seen: Any) -> News:
        return News(first_seen(self.record.created_at), self.record, [], set(), ())


@pytest.mark.parametrize("earlier_s", [1.0, -1.0])
async def test_a_session_that_another_replica_created_at_the_same_time_is_that_one(earlier_s: float) -> None:
    theirs = SessionRecord("s", created_at=1_000.0)
    registry, session = live(NewsOf(theirs), confirmed=False)
    session.record.created_at = theirs.created_at + earlier_s
    session.seen = first_seen(session.record.created_at)
    for _ in range(2):
        assert await registry.get("s") is session
    assert session.record is theirs and session.seen == first_seen(theirs.created_at)


async def test_a_row_that_was_there_and_is_gone_ends_the_session() -> None:
    registry, session = live(EmptyNews(), confirmed=True)
    with pytest.raises(SessionNotFound):
        await registry.get("s")
    assert registry.find("s") is None and session.ended.is_set()


async def test_a_session_that_is_forgotten_while_it_is_deleted_is_not_taken_back() -> None:
    registry, session = live(EmptyNews(), confirmed=True)
    registry.forget(session)
    registry.forget_deleted(session)
    assert registry.find("s") is None
    with pytest.raises(SessionNotFound):
        await registry.get("s")


class SlowNews(EmptyNews):
    """Answers the first query once `go` is set, with `first`, and the others with `later`."""

    def __init__(self, first: SessionRecord | None, later: SessionRecord) -> None:
        super().__init__()
        self.go, self.asked, self._answers = asyncio.Event(), 0, (first, later)

    async def load_news(self, session_id: str, seen: Any) -> News | None:  # type: ignore[override]
        self.asked += 1
        record = self._answers[min(self.asked, 2) - 1]
        if self.asked == 1:
            await self.go.wait()
        return None if record is None else News(first_seen(record.created_at), record, [], set(), ())


@pytest.mark.parametrize("found", [True, False])
async def test_a_request_that_joins_an_earlier_load_reads_the_database_itself(found: bool) -> None:
    """The load may have read it before another replica committed the turn that this request continues."""
    record = SessionRecord("s", created_at=1.0)
    news: Any = SlowNews(record if found else None, record)
    registry = Registry(news, Keyring(news, None), Metrics())
    first = asyncio.create_task(registry.get("s"))
    await until(lambda: news.asked == 1)
    joined = asyncio.create_task(registry.get("s"))
    await asyncio.sleep(0)
    news.go.set()
    session = await joined
    assert news.asked == 2 and session is registry.find("s")
    if found:
        assert await first is session
    else:
        with pytest.raises(SessionNotFound):
            await first
