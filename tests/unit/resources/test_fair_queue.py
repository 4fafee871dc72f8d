"""The queue in which owners take turns."""

from __future__ import annotations

from proxy.resources.fair_queue import FairQueue


def anything(_: str) -> bool:
    return True


def test_owners_take_turns_and_each_ones_items_keep_their_order() -> None:
    queue = FairQueue[str]()
    for owner, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        queue.put(owner, item)
    assert [queue.take(anything) for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]
    assert not queue


def test_an_item_that_does_not_fit_lets_the_others_pass() -> None:
    queue = FairQueue[str]()
    for owner, item in (("a", "large"), ("a", "small"), ("b", "small too")):
        queue.put(owner, item)
    assert list(queue) == ["large", "small", "small too"]
    taken = [queue.take(lambda item: item != "large") for _ in range(3)]
    assert taken == ["small", "small too", None]
    assert queue.take(anything) == "large"


def test_an_item_that_is_discarded_is_gone_and_discarding_it_again_does_nothing() -> None:
    queue = FairQueue[str]()
    queue.put("a", "one")
    queue.discard("a", "one")
    queue.discard("a", "one")
    assert not queue
    assert queue.take(anything) is None
