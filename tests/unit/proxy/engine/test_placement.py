"""Placement of sessions while servers die, return, join and leave."""

from __future__ import annotations

import random

import pytest

from proxy.engine.servers.placement import Member, SessionPlacement
from tokengrove.errors import EngineUnavailable


class Bare:
    """The part of an engine that placement uses."""

    def __init__(self, number: int) -> None:
        self.url = f"http://server-{number}"


def test_a_session_keeps_its_live_server_and_others_get_the_least_loaded() -> None:
    rng = random.Random(5)
    members = [Member(Bare(number), alive=True) for number in range(4)]  # type: ignore[arg-type]
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
        chosen, before = placement.choose(session), home.get(session)
        sure = [member for member in candidates if not member.doubtful] or candidates
        if session and before in candidates and not before.doubtful:
            assert chosen is before
        else:
            assert chosen in sure and chosen.in_flight == min(member.in_flight for member in sure)
        home[session] = chosen


@pytest.mark.parametrize(
    ("own", "other", "moves"), [(32, 0, False), (33, 0, True), (132, 100, False), (150, 100, False), (151, 100, True)]
)
def test_a_session_leaves_a_server_that_runs_far_more_than_another_one(own: int, other: int, moves: bool) -> None:
    members = [Member(Bare(number), alive=True) for number in range(2)]  # type: ignore[arg-type]
    placement = SessionPlacement(members)
    home = placement.choose("s")
    [away] = [member for member in members if member is not home]
    home.in_flight, away.in_flight = own, other
    assert placement.choose("s") is (away if moves else home)
    away.in_flight = 0
    away.doubtful = home.in_flight > 0
    assert placement.choose("s") is home  # nobody moves to a server that has just failed


def test_the_number_of_remembered_sessions_is_bounded() -> None:
    members = [Member(Bare(0), alive=True)]  # type: ignore[arg-type]
    placement = SessionPlacement(members, remembered=10)
    for number in range(50):
        placement.choose(f"s{number}")
    assert placement.sessions() == {"http://server-0": 10}
    placement.forget(members[0])
    assert not placement.sessions()


def test_the_session_that_was_used_least_recently_is_forgotten_first() -> None:
    members = [Member(Bare(number), alive=True) for number in range(2)]  # type: ignore[arg-type]
    placement = SessionPlacement(members, remembered=2)
    home = placement.choose("a")
    placement.choose("b")
    assert placement.choose("a") is home
    placement.choose("c")  # "b" is forgotten
    home.in_flight = 9
    assert placement.choose("a") is home


def test_of_idle_servers_the_one_that_served_least_gets_a_new_session() -> None:
    members = [Member(Bare(number), alive=True, served=served) for number, served in enumerate((2, 1, 3))]  # type: ignore[arg-type]
    assert SessionPlacement(members).choose("s") is members[1]
