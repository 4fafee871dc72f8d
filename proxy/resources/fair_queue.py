"""A queue of several owners' items, of which each owner has one after the other: who brings many waits longest."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterator
from itertools import chain
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """Items in order of arrival for each owner; the owners take turns."""

    def __init__(self) -> None:
        self._items: OrderedDict[Hashable, deque[_T]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._items)

    def __iter__(self) -> Iterator[_T]:
        return chain.from_iterable(self._items.values())

    def put(self, owner: Hashable, item: _T) -> None:
        """Add an item behind the other items of its owner. An owner without items comes after the other owners."""
        self._items.setdefault(owner, deque()).append(item)

    def take(self, fits: Callable[[_T], bool]) -> _T | None:
        """Remove and return the first item that `fits` of the first owner who has one; None if no item does."""
        for owner, items in self._items.items():
            for item in items:
                if fits(item):
                    self._items.move_to_end(owner)
                    self.discard(owner, item)
                    return item
        return None

    def discard(self, owner: Hashable, item: _T) -> None:
        """Remove an item, if it is still here."""
        items = self._items.get(owner)
        if items is not None and item in items:
            items.remove(item)
            if not items:
                del self._items[owner]
