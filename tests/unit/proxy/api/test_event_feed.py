"""Listeners are told once for all, and one that does not read holds nothing and nobody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import pytest

from proxy.api import event_feed
from proxy.api.event_feed import ALL_CHANGED, Feed, Kind, Listener
from proxy.protocols.sse import KEEPALIVE
from proxy.store.changed_sessions import ChangedSessions
from tests.support import until
from tokengrove.errors import StoreUnavailable, TooManyRequests

BOTH = frozenset(Kind)


class Numbers:
    """Stands for the statistics: counts how often they were read."""

    def __init__(self) -> None:
        self.read_count = 0
        self.failing = False
        self.error: Exception = StoreUnavailable("no database")

    async def read(self, history_s: float) -> dict[str, Any]:
        self.read_count += 1
        if self.failing:
            raise self.error
        return {"read": self.read_count}


class Workers:
    """Stands for what the workers say: each has its own changes."""

    def __init__(self, *changes: ChangedSessions) -> None:
        self.changes = dict(enumerate(changes))

    async def changed(self, places: Mapping[int, Any]) -> dict[int, Any]:
        return {number: each.since(places.get(number)) for number, each in self.changes.items()}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "_TICK_S", 0.001)
    monkeypatch.setattr(event_feed, "_SETTLE_S", 0.0)


def feed(*changes: ChangedSessions) -> tuple[Feed, Numbers, Workers]:
    numbers, workers = Numbers(), Workers(*changes)
    return Feed(numbers, workers), numbers, workers  # type: ignore[arg-type]


async def heard(listener: Listener, wanted: Callable[[str, Any], bool]) -> Any:
    """The data of the first event that is wanted."""
    while True:
        for event in (await listener.next()).decode().strip().split("\n\n"):
            name, data = event.split("\n")
            said = json.loads(data.removeprefix("data: "))
            if wanted(name.removeprefix("event: "), said):
                return said


def has(*names: str) -> Callable[[str, Any], bool]:
    return lambda kind, said: kind == "sessions" and set(names) <= set(said["changed"])


async def test_nothing_runs_without_a_listener(quick: None) -> None:
    told, numbers, _ = feed(ChangedSessions())
    assert told._task is None
    with told.listening(BOTH) as listener:
        await heard(listener, lambda kind, _: kind == "statistics")
        running = told._task
    assert running is not None and told._task is None
    await asyncio.wait([running])
    assert running.cancelled() and numbers.read_count >= 1


async def test_statistics_are_not_made_for_who_wants_sessions_only(quick: None) -> None:
    changes = ChangedSessions()
    told, numbers, _ = feed(changes)
    with told.listening(frozenset({Kind.SESSIONS})) as listener:
        for name in ("a", "b"):
            await until(lambda: changes._asked_at is not None)
            changes.note(name)
            await heard(listener, has(name))
    assert numbers.read_count == 0


async def test_all_listeners_share_one_event(quick: None) -> None:
    told, _, _ = feed(ChangedSessions())
    with told.listening(BOTH) as one, told.listening(BOTH) as other:
        told._tell(Kind.STATISTICS, event := b"event: statistics\ndata: {}\n\n")
        assert one._statistics is event is other._statistics


async def test_changes_of_all_workers_are_told_and_a_worker_that_is_gone_means_all(quick: None) -> None:
    first, second = ChangedSessions(), ChangedSessions()
    told, _, workers = feed(first, second)
    with told.listening(BOTH) as listener:
        await heard(listener, lambda kind, _: kind == "statistics")
        first.note("a")
        second.note("b")
        await heard(listener, has("a", "b"))
        del workers.changes[1]
        assert await heard(listener, lambda kind, said: kind == "sessions" and said["all"]) == {
            "changed": [],
            "all": True,
        }


async def test_one_that_does_not_read_keeps_the_newest_and_is_told_that_it_missed_some() -> None:
    listener = Listener(BOTH)
    for number in range(10_000):
        listener.tell(Kind.STATISTICS, b"event: statistics\ndata: %d\n\n" % number)
        listener.tell(Kind.SESSIONS, b"event: sessions\ndata: %d\n\n" % number)
        assert len(listener._notes) <= event_feed._MOST_NOTES
    found = await listener.next()
    assert found.startswith(b"event: statistics\ndata: 9999\n\n" + ALL_CHANGED)


async def test_statistics_that_were_read_are_not_told_again_with_a_later_note() -> None:
    listener = Listener(BOTH)
    listener.tell(Kind.STATISTICS, b"event: statistics\ndata: 1\n\n")
    assert await listener.next() == b"event: statistics\ndata: 1\n\n"
    listener.tell(Kind.SESSIONS, b"event: sessions\ndata: 2\n\n")
    assert await listener.next() == b"event: sessions\ndata: 2\n\n"


async def test_silence_is_broken_by_a_comment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_feed, "KEEPALIVE_S", 0.0)
    assert await Listener(BOTH).next() == KEEPALIVE


async def test_there_is_a_bound_and_room_again_when_one_leaves(quick: None) -> None:
    told, _, _ = feed(ChangedSessions())
    with ExitStack() as stack:
        with told.listening(BOTH):
            for _ in range(event_feed.MOST_LISTENERS - 1):
                stack.enter_context(told.listening(BOTH))
            with pytest.raises(TooManyRequests, match="64 clients listen"), told.listening(BOTH):
                pass
        with told.listening(BOTH):
            pass


@pytest.mark.parametrize("error", [StoreUnavailable("no database"), KeyError("no database")])
async def test_the_next_tick_comes_whatever_fails_in_one(
    quick: None, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    changes = ChangedSessions()
    told, numbers, _ = feed(changes)
    numbers.failing, numbers.error = True, error
    with told.listening(BOTH) as listener:
        await until(lambda: numbers.read_count > 0)
        changes.note("a")
        await heard(listener, has("a"))
        numbers.failing = False
        await heard(listener, lambda kind, _: kind == "statistics")
    assert "no database" in caplog.text
