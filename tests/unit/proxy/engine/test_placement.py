"""Placement of sessions while servers die, return, join and leave."""

from __future__ import annotations

import random

import pytest

from proxy.engine.requests import Failure
from proxy.engine.servers import placement as placements
from proxy.engine.servers.placement import Member, SessionPlacement
from tokengrove.errors import EngineUnavailable

PER_REQUEST = placements._PER_REQUEST


class Bare:
    """The part of an engine that placement uses."""

    def __init__(self, number: int) -> None:
        self.url = f"http://server-{number}"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def members_of(count: int) -> list[Member]:
    return [Member(Bare(number), alive=True) for number in range(count)]  # type: ignore[arg-type]


def test_a_session_keeps_its_live_server_and_others_get_the_least_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placements, "_PER_HELD", 0.0)
    rng = random.Random(5)
    members = members_of(4)
    placement, home = SessionPlacement(members), dict[str, Member]()
    for _ in range(3000):
        for member in members:
            if rng.random() < 0.05:
                member.alive, member.leaving, member.doubtful = (rng.random() < p for p in (0.8, 0.2, 0.2))
            member.in_flight = rng.randrange(6)
        session = rng.choice(["", *(f"s{n}" for n in range(12))])
        candidates = [member for member in members if member.alive and not member.leaving]
        if not candidates:
            with pytest.raises(EngineUnavailable):
                placement.choose(session)
            continue
        chosen, before = placement.choose(session, (), 6 * PER_REQUEST), home.get(session)
        sure = [member for member in candidates if not member.doubtful] or candidates
        if session and before in sure:
            assert chosen is before
        else:
            assert chosen in sure and chosen.in_flight == min(member.in_flight for member in sure)
        home[session] = chosen


@pytest.mark.parametrize(("more", "moves"), [(7, False), (9, True)])
def test_a_session_moves_once_the_load_outweighs_the_tokens_that_its_server_holds(more: int, moves: bool) -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("s", (), 100)
    placement.note_output("s", home, 8 * PER_REQUEST)
    [away] = [member for member in members if member is not home]
    home.in_flight, away.in_flight = 20 + more, 20
    assert placement.choose("s", (), 9 * PER_REQUEST) is (away if moves else home)


def test_tokens_that_a_server_holds_beyond_the_prompt_do_not_count() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("s", (), 100 * PER_REQUEST)
    home.in_flight = 9
    assert placement.choose("s", (), 8 * PER_REQUEST) is not home  # as after a compaction


def test_no_session_moves_to_a_server_that_has_just_failed() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("s", (), 10)
    [away] = [member for member in members if member is not home]
    home.in_flight, away.doubtful = 1000, True
    assert placement.choose("s", (), 10) is home


def test_a_request_goes_on_at_a_server_that_has_not_failed_it() -> None:
    members = members_of(3)
    placement = SessionPlacement(members)
    home = placement.choose("s", (), 10_000)
    lost = [Failure(home.url, "it died", 0.0, lost=True, counts=False)]
    second = placement.choose("s", lost, 10_000)
    assert second is not home
    for member in members:
        member.alive = member in (home, second)
    failed = [*lost, Failure(second.url, "500", 0.0, lost=False, counts=True)]
    assert placement.choose("s", failed, 10_000) is home  # it has lost the request, and not failed it


def test_a_new_session_prefers_the_server_that_has_the_prompt_of_its_group() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("a", (), 8 * PER_REQUEST, "g")
    [away] = [member for member in members if member is not home]
    home.in_flight = 7
    assert placement.choose("b", (), 8 * PER_REQUEST, "g") is home
    assert placement.choose("c", (), 8 * PER_REQUEST, "h") is away
    assert placement.choose("d", (), 8 * PER_REQUEST) is away
    home.in_flight = 9
    assert placement.choose("e", (), 8 * PER_REQUEST, "g") is away


def test_a_group_shares_no_more_than_the_shortest_of_its_prompts() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("a", (), 2 * PER_REQUEST, "g")
    placement.choose("a", (), 100 * PER_REQUEST, "g")
    home.in_flight = 3
    assert placement.choose("b", (), 100 * PER_REQUEST, "g") is not home


def test_a_new_session_prefers_the_server_where_live_sessions_hold_less() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("a", (), 100_000)
    [away] = [member for member in members if member is not home]
    away.served = 9
    assert placement.choose("b", (), 10) is away


def test_what_an_ended_session_holds_is_not_counted() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("a", (), 100_000)
    [away] = [member for member in members if member is not home]
    away.served = 9
    placement.release("a")
    placement.release("a")
    assert not placement.sessions()
    assert placement.choose("b", (), 10) is home


def test_a_session_or_group_that_nobody_uses_is_forgotten() -> None:
    members, clock = members_of(2), Clock()
    placement = SessionPlacement(members, clock=clock)
    home = placement.choose("a", (), 100_000, "g")
    clock.now = placements._HELD_S - 1.0
    home.in_flight = 1
    assert placement.choose("a", (), 100_000, "g") is home
    clock.now += placements._HELD_S + 1.0
    assert placement.choose("b", (), 100_000, "g") is not home
    assert placement.sessions() == {next(member.url for member in members if member is not home): 1}


def test_a_session_whose_request_takes_long_is_remembered_at_its_end() -> None:
    members, clock = members_of(2), Clock()
    placement = SessionPlacement(members, clock=clock)
    home = placement.choose("a", (), 10)
    clock.now += placements._HELD_S + 1.0
    placement.choose("b", (), 10)
    placement.note_output("a", home, 10_000)
    home.in_flight = 9
    assert placement.choose("a", (), 10_000) is home


def test_a_request_that_ends_elsewhere_or_at_a_dead_server_moves_no_session() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("a", (), 10)
    [away] = [member for member in members if member is not home]
    placement.note_output("a", away, 10_000)
    assert placement.sessions() == {home.url: 1}
    placement.forget(home)
    home.alive = False
    placement.note_output("a", home, 10_000)
    placement.note_output("", away, 10_000)
    assert not placement.sessions()


def test_a_server_holds_the_tokens_of_the_sessions_that_are_remembered_there() -> None:
    rng, clock = random.Random(7), Clock()
    members = members_of(3)
    placement = SessionPlacement(members, remembered=20, clock=clock)
    for _ in range(3000):
        name, member = f"s{rng.randrange(40)}", rng.choice(members)
        member.in_flight = rng.randrange(9)
        clock.now += rng.choice((0.0, 1.0, 200.0))
        match rng.randrange(6):
            case 0:
                placement.release(name)
            case 1:
                placement.note_output(name, member, rng.randrange(5000))
            case 2 if rng.random() < 0.05:
                placement.forget(member)
            case _:
                placement.choose(name, (), rng.randrange(5000), f"g{rng.randrange(5)}")
        for each in members:
            homes = [home for home in placement._homes.values() if home.member is each]
            assert placement._held[each] == sum(home.tokens for home in homes)


def test_a_server_that_returns_holds_nothing() -> None:
    members = members_of(2)
    placement = SessionPlacement(members)
    home = placement.choose("a", (), 100_000, "g")
    placement.forget(home)
    assert not placement.sessions()
    home.in_flight = 1
    assert placement.choose("a", (), 100_000, "g") is not home


def test_the_number_of_remembered_sessions_and_groups_is_bounded() -> None:
    members = members_of(1)
    placement = SessionPlacement(members, remembered=10)
    for number in range(50):
        placement.choose(f"s{number}", (), 1, f"g{number}")
    assert placement.sessions() == {"http://server-0": 10} and len(placement._groups) == 10
    assert placement._held[members[0]] == 10
    placement.forget(members[0])
    assert not placement.sessions()


def test_the_session_that_was_used_least_recently_is_forgotten_first() -> None:
    members = members_of(2)
    placement = SessionPlacement(members, remembered=2)
    home = placement.choose("a", (), 10 * PER_REQUEST)
    placement.choose("b", (), 10 * PER_REQUEST)
    assert placement.choose("a", (), 10 * PER_REQUEST) is home
    placement.choose("c", (), 10 * PER_REQUEST)  # "b" is forgotten
    home.in_flight = 9
    assert placement.choose("a", (), 10 * PER_REQUEST) is home


def test_of_idle_servers_the_one_that_served_least_gets_a_new_session() -> None:
    members = members_of(3)
    for member, served in zip(members, (2, 1, 3), strict=True):
        member.served = served
    assert SessionPlacement(members).choose("s") is members[1]
