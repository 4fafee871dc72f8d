"""What all workers know, added: each goes on from its own place."""

from __future__ import annotations

from typing import Any

from proxy.telemetry.metrics import Metrics
from proxy.workers.common_live import CommonLive


class Peers:
    """Stands for the other workers. `asked`: what they were asked."""

    def __init__(self, number: int, answers: list[Any]) -> None:
        self.number = number
        self.asked: list[tuple[str, Any]] = []
        self._answers = answers

    async def ask_all(self, what: str, argument: Any, limit_s: float) -> list[Any]:
        self.asked.append((what, argument))
        return self._answers


async def test_a_worker_goes_on_from_its_own_place_and_the_others_are_asked_with_all_of_them() -> None:
    peers: Any = Peers(2, [(0, "of the first"), (1, "of the second")])
    live = CommonLive(Metrics().history, lambda place: f"since {place}", peers)
    places = {0: "a", 1: "b", 2: "c"}
    assert await live.changed(places) == {0: "of the first", 1: "of the second", 2: "since c"}
    assert peers.asked == [("changed", places)]
    assert await live.own_changed({0: "a"}) == (2, "since None")


async def test_a_process_alone_asks_nobody() -> None:
    live = CommonLive(Metrics().history, lambda place: f"since {place}", None)
    assert await live.changed({0: "a"}) == {0: "since a"}
    assert await live.samples(0) == []
