"""Choices of several senders that wait for places and are cancelled at every moment: at the end no place is taken."""

from __future__ import annotations

from collections import Counter

from proxy.resources.places import Places
from proxy.resources.senders import Sender, Senders
from tests.torture.runs import World, scenario

_MOST = 8
_SENDERS = [Sender(host, name) for host in ("one", "two") for name in ("a", "b")]


@scenario
async def places_of_choices(world: World) -> None:
    """Everybody gets a place in the end, who has few never waits, and what was cancelled keeps none."""
    senders, had = Senders(), Counter[Sender]()
    places = Places(senders, lambda: _MOST, world.loop.time)

    async def choice(sender: Sender) -> None:
        few = senders.running.of_host.get(sender.host, 0) + senders.queued.of_host.get(sender.host, 0) < _MOST // 2
        if not places.take_now(sender):
            assert not few, f"{sender} waits beside {senders.running.of}"
            await places.take(sender)
        had[sender] += 1
        try:
            assert senders.running.of[sender] > 0
            await world.some_time(0.02)
        finally:
            places.give_back(sender)

    async def send(sender: Sender, number: int) -> None:
        for _ in range(number):
            await world.some_time(0.05)
            many = world.random.choice([1, 1, 2, 12])
            await world.all(*(world.abandon_some(choice(sender), 0.02, 0.3) for _ in range(many)))

    await world.all(*(send(sender, world.random.randrange(1, 4)) for sender in _SENDERS))
    assert not senders.running.of and not senders.queued.of, (senders.running.of, senders.queued.of)
    assert senders.running.total == 0 == senders.queued.total and not places._waiting
    await world.all(*(choice(sender) for sender in _SENDERS))
