"""The queue in which owners take turns."""

from __future__ import annotations

from proxy.resources.fair_queue import FairQueue
from proxy.resources.senders import Sender


def anything(_: str) -> bool:
    return True


def test_owners_take_turns_and_each_ones_items_keep_their_order() -> None:
    queue = FairQueue[str]()
    for owner, item in (("a", "a1"), ("a", "a2"), ("a", "a3"), ("b", "b1"), ("c", "c1"), ("b", "b2")):
        queue.put(Sender(name=owner), item)
    assert [queue.take(anything) for _ in range(7)] == ["a1", "b1", "c1", "a2", "b2", "a3", None]
    assert not queue


def test_an_item_that_does_not_fit_lets_the_others_pass() -> None:
    queue = FairQueue[str]()
    for owner, item in (("a", "large"), ("a", "small"), ("b", "small too")):
        queue.put(Sender(name=owner), item)
    assert list(queue) == ["large", "small", "small too"]
    taken = [queue.take(lambda item: item != "large") for _ in range(3)]
    assert taken == ["small", "small too", None]
    assert queue.take(anything) == "large"


def test_an_item_that_is_discarded_is_gone_and_discarding_it_again_does_nothing() -> None:
    queue = FairQueue[str]()
    queue.put(Sender(name="a"), "one")
    queue.discard(Sender(name="a"), "one")
    queue.discard(Sender(name="a"), "one")
    assert not queue
    assert queue.take(anything) is None


def test_hosts_take_turns_whatever_number_of_senders_each_has() -> None:
    queue = FairQueue[str]()
    for number in range(4):
        queue.put(Sender("crowd", f"s{number}"), f"crowd {number}")
    queue.put(Sender("other", "s"), "other 0")
    queue.put(Sender("other", "s"), "other 1")
    taken = [queue.take(anything) for _ in range(6)]
    assert taken == ["crowd 0", "other 0", "crowd 1", "other 1", "crowd 2", "crowd 3"]


def test_only_as_many_items_of_each_sender_are_looked_at_as_asked() -> None:
    queue, seen = FairQueue[str](), list[str]()
    for owner, item in (("a", "a1"), ("a", "a2"), ("b", "b1")):
        queue.put(Sender(name=owner), item)
    assert queue.take(lambda item: bool(seen.append(item)), look=1) is None
    assert seen == ["a1", "b1"]
    assert Sender(name="a") in queue and Sender(name="c") not in queue and Sender("elsewhere", "a") not in queue
