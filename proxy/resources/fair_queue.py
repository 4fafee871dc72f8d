"""A queue of the items of several senders. Hosts take turns, and so do the senders of a host.

A sender of many items waits longest.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Generic, TypeVar

from proxy.resources.senders import Sender

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """Items in order of arrival for each sender. `hosts`: the senders with items, by host."""

    def __init__(self) -> None:
        self.hosts: OrderedDict[str, OrderedDict[Sender, deque[_T]]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self.hosts)

    def __contains__(self, sender: Sender) -> bool:
        """True if the sender has an item in the queue."""
        return sender in self.hosts.get(sender.host, ())

    def __iter__(self) -> Iterator[_T]:
        return (item for senders in self.hosts.values() for items in senders.values() for item in items)

    def put(self, sender: Sender, item: _T) -> None:
        """Add an item after the other items of its sender. A new sender comes after the others."""
        self.hosts.setdefault(sender.host, OrderedDict()).setdefault(sender, deque()).append(item)

    def take(self, fits: Callable[[_T], bool], look: int | None = None) -> _T | None:
        """Remove and return the first item that `fits`, of the first sender with such an item; None if there is none.

        `look`: the number of items of each sender to examine; None: all.
        """
        for host, senders in self.hosts.items():
            for sender, items in senders.items():
                for item in islice(items, look):
                    if fits(item):
                        self.hosts.move_to_end(host)
                        senders.move_to_end(sender)
                        self.discard(sender, item)
                        return item
        return None

    def discard(self, sender: Sender, item: _T) -> None:
        """Remove an item, if it is still in the queue."""
        senders = self.hosts.get(sender.host)
        items = None if senders is None else senders.get(sender)
        if senders is not None and items is not None and item in items:
            items.remove(item)
            if not items:
                del senders[sender]
                if not senders:
                    del self.hosts[sender.host]
