"""Places of running choices: a sender alone has all it asks for, and beside others who has many waits for itself."""

from __future__ import annotations

import asyncio

import pytest

from proxy.resources.places import Places
from proxy.resources.senders import Sender, Senders

MOST = 16
CROWD, VICTIM, ELSEWHERE = Sender("h", "crowd"), Sender("h", "victim"), Sender("other", "victim")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def senders() -> Senders:
    return Senders()


@pytest.fixture
def places(senders: Senders, clock: Clock) -> Places:
    return Places(senders, lambda: MOST, clock)


def take_all(places: Places, sender: Sender) -> int:
    taken = 0
    while taken < 1000 and places.take_now(sender):
        taken += 1
    return taken


def test_a_sender_who_is_alone_never_waits(places: Places) -> None:
    assert take_all(places, CROWD) == 1000


@pytest.mark.parametrize("other", [VICTIM, ELSEWHERE])
def test_beside_another_sender_who_has_many_leaves_a_quarter_of_the_places(places: Places, other: Sender) -> None:
    assert places.take_now(other)
    assert take_all(places, CROWD) == MOST * 3 // 4 - 1
    assert take_all(places, other) == MOST // 2 - 1


@pytest.mark.parametrize("other", [VICTIM, ELSEWHERE])
def test_who_was_here_lately_counts_as_here(places: Places, clock: Clock, other: Sender) -> None:
    assert places.take_now(other)
    places.give_back(other)
    clock.now += 59.0
    assert take_all(places, CROWD) == MOST * 3 // 4
    assert places.take_now(other)
    places.give_back(other)
    clock.now += 61.0
    assert take_all(places, CROWD) == 1000


def test_many_sessions_with_a_few_choices_each_never_wait(places: Places) -> None:
    for number in range(100):
        for _ in range(MOST // 2):
            assert places.take_now(Sender("h", f"s{number}"))


def test_many_sessions_of_one_host_share_what_the_host_may_have_beside_another(places: Places) -> None:
    assert places.take_now(ELSEWHERE)
    taken = sum(places.take_now(Sender("h", f"s{number}")) for number in range(100))
    assert taken == MOST * 3 // 4 - 1


async def test_places_that_become_free_go_to_those_who_wait_first_to_who_has_least(
    places: Places, senders: Senders
) -> None:
    order, most = list[str](), take_all(places, CROWD)  # alone so far
    assert take_all(places, VICTIM) == MOST // 2

    async def take(sender: Sender, name: str) -> None:
        await places.take(sender)
        order.append(name)

    tasks = [asyncio.create_task(take(CROWD, f"crowd {number}")) for number in range(3)]
    tasks += [asyncio.create_task(take(VICTIM, f"victim {number}")) for number in range(2)]
    await asyncio.sleep(0)
    assert senders.queued.of == {CROWD: 3, VICTIM: 2} and not order
    places.give_back(VICTIM)
    await asyncio.sleep(0)
    assert order == ["victim 0"]
    for _ in range(most):
        places.give_back(CROWD)
        await asyncio.sleep(0)
    await asyncio.gather(*tasks)
    assert [name for name in order if "crowd" in name] == ["crowd 0", "crowd 1", "crowd 2"]
    assert senders.queued.of == {} and senders.queued.total == 0
    assert senders.running.of == {CROWD: 3, VICTIM: MOST // 2 + 1}


async def test_a_waiter_that_is_cancelled_keeps_no_place(places: Places, senders: Senders) -> None:
    assert places.take_now(VICTIM)
    crowd = take_all(places, CROWD)
    waiting = [asyncio.create_task(places.take(CROWD)) for _ in range(2)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    places.give_back(CROWD)  # before the cancelled task has run
    await asyncio.wait(waiting)
    assert waiting[0].cancelled() and not waiting[1].cancelled()
    assert senders.running.of == {VICTIM: 1, CROWD: crowd} and senders.queued.total == 0


async def test_a_waiter_that_is_cancelled_as_it_gets_its_place_passes_it_on(places: Places, senders: Senders) -> None:
    assert places.take_now(VICTIM)
    crowd = take_all(places, CROWD)
    waiting = [asyncio.create_task(places.take(CROWD)) for _ in range(2)]
    await asyncio.sleep(0)
    places.give_back(CROWD)
    waiting[0].cancel()  # after it got its place, before its task has run
    await asyncio.wait(waiting)
    assert waiting[0].cancelled() and not waiting[1].cancelled()
    assert senders.running.of == {VICTIM: 1, CROWD: crowd} and senders.queued.total == 0


async def test_a_sender_that_waits_is_logged_once(places: Places, caplog: pytest.LogCaptureFixture) -> None:
    assert places.take_now(VICTIM)
    take_all(places, CROWD)
    for _ in range(3):
        waiting = asyncio.create_task(places.take(CROWD))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
    assert [record.message for record in caplog.records] == [
        "session 'crowd' at h has 11 choices running, and further ones wait, since others are here too: 16 places are "
        "shared (--shared-running-requests). This is logged once for each session"
    ]
