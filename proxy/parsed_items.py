"""What was parsed of the items that the latest bodies of a session have: the messages of a conversation.

An agent sends its whole history with every turn. A body that begins with the items of an earlier one, byte for byte as
JSON, is parsed only from there on. What is kept is a function of these bytes, so it never goes stale.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar

import orjson
from xxhash import xxh3_128_digest

from proxy.types import Api, ImagePart

FEWEST = 64
"""Fewer items are parsed anew: that takes no longer than to look for them."""

# An agent and its sub-agents may take turns in one session; each conversation has two states.
_KEPT = 8
# The second state is this many items before the end: clients mark their last messages (`cache_control`), and siblings
# differ in them.
_TAIL = 8
# Nothing is kept of more: no conversation that fits a context is longer, and a refused one must not stay in memory.
_MOST_BYTES = 8 * 2**20
_ENDS = b",]"
_MARK = secrets.token_hex(16)


class Copyable(Protocol):
    """The state of a parser after some items."""

    def copy(self) -> Self:
        """Return an equal state that shares nothing that changes."""


S = TypeVar("S", bound=Copyable)


class _Known(NamedTuple, Generic[S]):
    """A state after the first `items`. `size`, `digest`: of their JSON as an array, without its last bracket."""

    size: int
    digest: bytes
    items: int
    state: S

    def begins(self, array: memoryview) -> bool:
        """Whether the JSON of an array begins with these items."""
        size = self.size
        return size < len(array) and array[size] in _ENDS and xxh3_128_digest(array[:size]) == self.digest


class ParsedItems(Generic[S]):
    """The states of one API's parser after the items of the latest bodies. Nobody may change them."""

    def __init__(self) -> None:
        self._kept: list[_Known[S]] = []

    def read(self, items: list[Any], state: S, parse: Callable[[S, list[Any], int], object]) -> S:
        """Return the state after all items, which nobody may change.

        `state`: that before the first item. `parse(state, items, start)` brings a state forward, from the item with
        index `start` to the end.
        """
        try:
            array = memoryview(orjson.dumps(items, _image_json))
        except orjson.JSONEncodeError:  # nested deeper than orjson writes
            parse(state, items, 0)
            return state
        if len(array) > _MOST_BYTES:
            parse(state, items, 0)
            return state
        known = [one for one in self._kept if one.begins(array)]
        kept = [one for one in self._kept if one not in known]
        start, middle, end = 0, len(items) - _TAIL, len(items)
        if known:
            base = max(known, key=attrgetter("items"))
            start, state = base.items, base.state.copy()
            kept.append(base)
        if start < middle:
            parse(state, items[:middle], start)
            size = len(array) - len(orjson.dumps(items[middle:], _image_json))
            kept[len(kept) - bool(known) :] = [_Known(size, xxh3_128_digest(array[:size]), middle, state.copy())]
            start = middle
        if start < end:
            parse(state, items, start)
            kept.append(_Known(len(array) - 1, xxh3_128_digest(array[:-1]), end, state))
        self._kept = kept[-_KEPT:]
        return state


def _image_json(image: object) -> Any:
    """An image whose source was read (`protocols.image_sources`), as no client can write it."""
    if isinstance(image, ImagePart):
        return {_MARK: [*image]}
    raise TypeError


ParsedBodies = dict[Api, ParsedItems[Any]]
"""Those of one session. The state differs by API."""
