"""Mean rewards of the sessions that ended last: read in bounded pieces, and what is known is not read again."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from proxy.sessions import recent_rewards
from proxy.sessions.recent_rewards import RecentRewards
from proxy.store.ended import Ended
from proxy.store.session_query import SessionQuery
from proxy.types import Interaction, SessionRecord
from tests.interactions import interaction
from tokengrove.options.session import SessionStatus


class Stored:
    """Stands for the database: sessions by id with their only reward, and what was read of them."""

    def __init__(self) -> None:
        self.sessions: dict[str, SessionRecord] = {}
        self.rewards: dict[str, float | None] = {}
        self.turns: dict[str, int] = {}
        self.read: list[list[str]] = []

    def end(self, name: str, reward: float | None, *, version: int = 0, at: float = 0.0, turns: int = 1) -> None:
        self.sessions[name] = SessionRecord(
            session_id=name, status=SessionStatus.ENDED, weight_version=version, ended_at=at, updated_at=at
        )
        self.rewards[name], self.turns[name] = reward, turns

    async def last_ended(self, most: int) -> list[Ended]:
        newest = list(reversed(self.sessions.values()))[:most]
        return [Ended(each.session_id, each.updated_at, self.turns[each.session_id]) for each in newest]

    async def find_sessions(self, wanted: SessionQuery) -> list[SessionRecord]:
        assert wanted.session_ids is not None
        self.read.append(list(wanted.session_ids))
        return [self.sessions[name] for name in wanted.session_ids]

    async def load_steps(self, names: Collection[str], *, roots: bool) -> dict[str, list[Interaction]]:
        return {name: [interaction(f"{name}-0", reward=self.rewards[name])] for name in names}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


async def read(rewards: RecentRewards, clock: Clock) -> Any:
    """What is known once a look that begins now is over."""
    clock.now += 1000
    await rewards.read()
    assert rewards._reading is not None
    await rewards._reading
    return rewards._shown


def made() -> tuple[Stored, Clock, RecentRewards]:
    stored, clock = Stored(), Clock()
    return stored, clock, RecentRewards(stored, clock)  # type: ignore[arg-type]


async def test_means_are_by_version_and_by_period_of_those_with_a_reward() -> None:
    stored, clock, rewards = made()
    for number, (reward, version) in enumerate([(1.0, 3), (0.0, 3), (None, 3), (0.5, 4)]):
        stored.end(f"s{number}", reward, version=version, at=100.0 + number // 2)
    found = await read(rewards, clock)
    assert found == {
        **{"sessions": 4, "unread": 0, "rewarded": 3, "period_s": 1},
        "by_version": [{"version": 3, "sessions": 2, "mean": 0.5}, {"version": 4, "sessions": 1, "mean": 0.5}],
        "over_time": [{"at": 100.0, "sessions": 2, "mean": 0.5}, {"at": 101.0, "sessions": 1, "mean": 0.5}],
    }


async def test_a_reward_after_the_end_moves_no_session_in_time() -> None:
    stored, clock, rewards = made()
    stored.end("a", 1.0, at=100.0)
    stored.sessions["a"] = replace(stored.sessions["a"], updated_at=900.0)
    assert [period["at"] for period in (await read(rewards, clock))["over_time"]] == [100.0]


async def test_of_very_many_versions_the_newest_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_rewards, "_MOST_VERSIONS", 2)
    stored, clock, rewards = made()
    for version in (4, 1, 3, 2):
        stored.end(f"s{version}", 1.0, version=version)
    assert [each["version"] for each in (await read(rewards, clock))["by_version"]] == [3, 4]


async def test_what_is_left_is_read_soon_and_a_slow_database_is_left_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_rewards, "_AT_ONCE", 1)
    stored, clock, rewards = made()
    for name in ("a", "b"):
        stored.end(name, 1.0)

    async def read_in(seconds: float) -> int:
        """How many pieces were read once somebody asked, so long after the end of the last."""
        clock.now += seconds
        await rewards.read()
        assert rewards._reading is not None
        await rewards._reading
        return len(stored.read)

    assert [await read_in(0), await read_in(1), await read_in(1)] == [1, 2, 2]
    assert (await read_in(5), stored.read) == (2, [["b"], ["a"]])
    stored.end("slow", 1.0)
    found = stored.find_sessions

    async def slow(wanted: SessionQuery) -> list[SessionRecord]:
        clock.now += 10
        return await found(wanted)

    monkeypatch.setattr(stored, "find_sessions", slow)
    assert await read_in(6) == 3
    stored.end("next", 1.0)
    assert [await read_in(100), await read_in(101)] == [3, 4]


async def test_only_what_is_new_or_changed_is_read_again() -> None:
    stored, clock, rewards = made()
    stored.end("a", 1.0)
    stored.end("b", 0.0)
    await read(rewards, clock)
    stored.end("c", 0.0)
    stored.sessions["a"] = replace(stored.sessions["a"], updated_at=50.0)
    stored.rewards["a"] = 0.0
    assert (await read(rewards, clock))["by_version"] == [{"version": 0, "sessions": 3, "mean": 0.0}]
    await read(rewards, clock)
    assert [sorted(names) for names in stored.read] == [["a", "b"], ["a", "c"]]


async def test_many_are_read_in_pieces_the_newest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_rewards, "_AT_ONCE", 2)
    stored, clock, rewards = made()
    for number in range(5):
        stored.end(f"s{number}", 1.0)
    unread = [(await read(rewards, clock))["unread"] for _ in range(3)]
    assert (unread, stored.read) == ([3, 1, 0], [["s4", "s3"], ["s2", "s1"], ["s0"]])


async def test_a_session_of_very_many_turns_is_a_piece_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_rewards, "_TURNS_AT_ONCE", 10)
    stored, clock, rewards = made()
    stored.end("small", 1.0)
    stored.end("large", 1.0, turns=1000)
    await read(rewards, clock)
    await read(rewards, clock)
    assert stored.read == [["large"], ["small"]]


async def test_who_asks_does_not_wait_for_a_second_look_and_none_begins_at_once() -> None:
    stored, clock, rewards = made()
    stored.end("a", 1.0)
    await read(rewards, clock)
    stored.end("b", 0.0)
    assert (await rewards.read() or {})["sessions"] == 1
    assert len(stored.read) == 1
    clock.now += 8
    assert (await rewards.read() or {})["sessions"] == 1  # from before: the look goes on meanwhile
    await asyncio.wait([rewards._reading] if rewards._reading else [])
    assert (await rewards.read() or {})["sessions"] == 2


def test_there_are_at_most_sixty_periods_over_any_time() -> None:
    for span in (0.0, 50.0, 3600.0, 86_400.0, 30 * 86_400.0):
        width = recent_rewards._width([1e9, 1e9 + span])
        assert span // width + 2 <= recent_rewards._MOST_PERIODS


async def test_who_asks_after_a_long_time_gets_the_means_of_now() -> None:
    stored, clock, rewards = made()
    stored.end("a", 1.0)
    await read(rewards, clock)
    stored.end("b", 0.0)
    clock.now += 3600
    found = await rewards.read()
    assert found is not None and found["by_version"] == [{"version": 0, "sessions": 2, "mean": 0.5}]
