"""A summary is made once for each state of its session, and never kept for another state."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from proxy.api import summaries
from proxy.api.pace import Pace
from proxy.api.summaries import Summaries
from proxy.store.recordings import SessionReads
from proxy.types import ListedSession, Outline, SessionRecord
from tests.interactions import interaction


class Stored(SessionReads):
    """Sessions of some turns by id. `loaded`: the ids whose turns were read."""

    def __init__(self, **turns: int) -> None:
        self.turns = turns
        self.loaded: list[str] = []

    async def load_outlines(self, session_ids: Collection[str]) -> dict[str, Outline]:
        self.loaded += session_ids
        return {name: outline(self.turns[name]) for name in session_ids}


def outline(turns: int) -> Outline:
    return Outline([interaction(f"i{seq}", seq=seq) for seq in range(turns)], 0, 0, None)


def listed(name: str, turns: int, revision: int = 0, created_at: float = 1.0) -> ListedSession:
    return ListedSession(SessionRecord(name, created_at=created_at), turns, revision)


def summaries_of(stored: Stored) -> Summaries:
    return Summaries(stored, Pace(lambda: False))


async def turns(kept: Summaries, *sessions: ListedSession) -> list[int]:
    return [summary.turns for _, summary in await kept.of(sessions)]


async def test_only_sessions_that_changed_are_read_again() -> None:
    stored = Stored(a=1, b=2)
    kept = summaries_of(stored)
    assert await turns(kept, listed("b", 2), listed("a", 1)) == [2, 1]
    assert await turns(kept, listed("a", 1), listed("b", 2)) == [1, 2]
    assert stored.loaded == ["b", "a"]
    await turns(kept, listed("a", 1, revision=1), listed("b", 2))  # a reward
    await turns(kept, listed("a", 1, revision=1, created_at=2.0))  # another session under its id
    assert stored.loaded == ["b", "a", "a", "a"]


async def test_a_turn_that_comes_between_listing_and_reading_is_not_kept_for_the_listed_state() -> None:
    stored = Stored(a=2)
    kept = summaries_of(stored)
    assert await turns(kept, listed("a", 1)) == [2]
    assert await turns(kept, listed("a", 1)) == [2]
    assert await turns(kept, listed("a", 2)) == [2]
    assert stored.loaded == ["a", "a", "a"]


async def test_the_summaries_that_were_looked_at_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "_KEPT", 2)
    stored = Stored(a=0, b=0, c=0)
    kept = summaries_of(stored)
    for name in ("a", "b", "a", "c", "a", "b"):
        await turns(kept, listed(name, 0))
    assert stored.loaded == ["a", "b", "c", "b"]


async def test_more_sessions_than_are_kept_are_summed_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summaries, "_KEPT", 1)
    assert await turns(summaries_of(Stored(a=1, b=2)), listed("a", 1), listed("b", 2)) == [1, 2]
